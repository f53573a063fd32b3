"""What the report and the picture say about profiles that are known."""

import re
from dataclasses import replace

import pytest
import torch
from lab.kernels import Kernels
from lab.sizes import Size
from lab.timing import Spread
from markdown_tables import table_rows
from profiles import machine, point_of, profile_of, samples_of
from profiling.records import Trust
from profiling.report import describe, report

SIZE = Size(
    batch_size=2, seq_len=5, d_model=12, num_heads=6, num_kv_heads=2, d_head=4, d_ff=20
)
DOUBTS = Trust(
    waited_share=1.39, others_share=0.0, spread=0.0, median_above_fastest=0.0
)


def made(mode="train", ceilings=None, trust=None, rounds=5, **settings):
    """Return a profile in which the whole takes 30 s, and the parts take 24 s of them."""
    samples = samples_of(SIZE, mode, 1.0, whole=10.0, smallest=0.5, rounds=rounds)
    point = point_of(SIZE, samples)
    if trust is not None:
        point = replace(point, trust=trust)
    return profile_of(point, mode=mode, ceilings=ceilings, **settings)


def text_of(profile):
    return "\n\n".join(map(str, report(profile)))


def cells(text, name):
    """Return the cells of the first row of this name."""
    for row in table_rows(text):
        if row[0] == name:
            return row
    raise AssertionError(f"no row {name}")


def test_description_names_what_differs_in_a_sweep():
    longer = replace(SIZE, seq_len=9)
    expected = "2 shared key heads, d_ff 20"
    assert describe(SIZE).endswith(expected)
    assert "5 to 9 tokens" in describe(SIZE, longer)
    stack = replace(SIZE, num_layers=3, qk_norm=True, num_kv_heads=6)
    assert describe(stack) == (
        "Transformer of 3 blocks: batch 2, 5 tokens, d_model 12, 6 heads of 4, d_ff 20, q/k norm"
    )


def test_header_says_what_the_ceilings_are():
    expected = (
        "Measured ceilings: 1.00 GFLOP/s (1024 x 1024 matrix product, in bursts; "
        "1.00 GFLOP/s sustained for 0.5 s), 100 MB/s (1.05 MB copy)\nDatasheet: n/a"
    )
    assert expected in text_of(made())


def test_shares_have_one_base_and_name_what_no_part_accounts_for():
    text = text_of(made())
    assert "\nShare: percentage of the time of forward and backward\n" in text
    assert cells(text, "ffn")[-1] == "10.0%"
    assert cells(text, "Block minus parts") == [
        "Block minus parts",
        "2000",
        "",
        "4000",
        "",
        "20.0%",
    ]
    assert cells(text, "Block")[-1] == "100%"
    # In a step, the update is a part of the total, too: 3 of 40 s, and 5 of 40 s.
    text = text_of(made("step"))
    assert cells(text, "ffn")[-1] == "7.5%"
    assert cells(text, "AdamW")[-1] == "12.5%"
    assert cells(text, "Block minus parts")[-1] == "27.5%"


def test_summary_has_a_range_that_can_be_read():
    profile = made("forward")
    (point,) = profile.points
    forward = replace(
        point.whole.passes["forward"], seconds=Spread(1e-3, 0.228e-3, 76.5e-3, 7)
    )
    whole = replace(point.whole, passes={"forward": forward})
    profile = replace(profile, points=(replace(point, whole=whole),))
    assert "Forward: 1.00 ms (p20 to p80: 0.23 to 76.5), " in text_of(profile)


def test_overhead_is_a_share_of_the_total_on_a_cpu():
    line = (
        "Fixed overhead (the same calls on a tiny input): 1500 ms, "
        "5.0% of the time of forward and backward\n"
    )
    assert line in text_of(made())


@pytest.mark.parametrize(
    ("kernels", "is_shown"),
    [
        (Kernels(9, 0.5, 0.5, launch_bound=True), True),
        (None, True),
        # A GPU that is busy all the time does not wait for the host.
        (Kernels(9, 0.9, 0.9, launch_bound=False), False),
    ],
)
def test_overhead_on_a_gpu_is_shown_where_it_waits_for_the_host(kernels, is_shown):
    profile = made()
    settings = replace(profile.settings, device=torch.device("cuda:0"))
    point = replace(profile.points[0], kernels=kernels)
    text = text_of(replace(profile, settings=settings, points=(point,)))
    # Host and GPU overlap, so it is no share of the total.
    line = "Fixed overhead (the same calls on a tiny input): 1500 ms\n"
    assert (line in text) == is_shown
    assert ("Fixed overhead" in text) == is_shown


def test_losses_have_causes_unless_the_figures_cannot_be_trusted():
    loss = r"^  .*, [0-9.]+%; [a-z]"
    assert re.search(loss, text_of(made()), re.MULTILINE)
    text = text_of(made(trust=DOUBTS))
    assert "Do not trust these figures:\n- threads waited for a core" in text
    lost = "Most time lost against the roofline, as a share of the time of "
    assert f"{lost}forward and backward:\n  " in text
    assert not re.search(loss, text, re.MULTILINE)


def test_each_reason_to_doubt_has_a_line():
    text = text_of(made(trust=replace(DOUBTS, others_share=0.72)))
    _, doubts, *_ = text.split("\n\n")
    assert doubts.splitlines()[:3] == [
        "Do not trust these figures:",
        "- threads waited for a core for 139% of the run time (sum over all threads)",
        "- other programs kept 72% of all cores busy",
    ]


def test_summary_says_what_each_mfu_counts():
    text = text_of(made(ceilings=machine(1e5, 1e8)))
    (line,) = [line for line in text.splitlines() if line.startswith("MFU")]
    causal, dense = re.findall(r"([\d.]+)% counting", line)
    assert float(causal) < float(dense)
    assert f"{causal}% counting only the causal attention scores" in line
    assert f"{dense}% counting all scores" in line


def test_report_doubts_a_profile_of_few_samples():
    text = text_of(made(rounds=1))
    expected = "Do not trust these figures:\n- each time has 1 sample, fewer than 5\n"
    assert expected in text
    assert "Do not trust" not in text_of(made())


def test_ceiling_that_is_too_low_leaves_no_percentages_of_it():
    text = text_of(made(ceilings=machine(1e3, 1e8)))
    assert (
        "The measured ceiling is too low:\n- forward of ffn at 10 tokens reaches "
        in text
    )
    for absent in ("of roofline", "of the roofline", "MFU", "Most time lost"):
        assert absent not in text.replace(_legend(text), "")
    assert "MFU (FLOP/s of the matrix products / measured ceiling): " in text_of(made())


def _legend(text):
    """Return the last paragraph, which explains all terms."""
    return text.rpartition("\n\n")[2]


def test_sweep_has_a_row_for_each_size_and_doubts_that_name_it():
    short = made(trust=DOUBTS).points[0]
    samples = samples_of(replace(SIZE, seq_len=9), "train", 1.0, 10.0, 0.5)
    long = point_of(replace(SIZE, seq_len=9), samples)
    text = text_of(profile_of(short, long, mode="train", sweep="seq-len"))
    assert "\n- seq-len 5: threads waited for a core" in text
    assert cells(text, "9")[:6] == [
        "9",
        "30000",
        "30000 to 30000",
        "1500",
        "0.60",
        "0.0006%",
    ]
    assert cells(text, "ffn") == ["ffn", "3000", "3000"]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Return a function that draws a profile and returns both axes of the picture, and its title."""
    pytest.importorskip("matplotlib")
    from profiling import plot

    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, path: figures.append(figure))

    def draw(profile):
        plot.plot(profile, tmp_path / "x.png")
        return (*figures[-1].axes, figures[-1].get_suptitle())

    return draw


def test_markers_of_the_picture_stay_at_their_coordinates(drawn):
    profile = made("step")
    roofline, _, _ = drawn(profile)
    found = {(*line.get_xdata(), *line.get_ydata()) for line in roofline.get_lines()}
    (point,) = profile.points
    for part in (*point.addends, point.whole):
        for name, each in part.passes.items():
            place = (each.cost.intensity, each.cost.flops / each.seconds.median)
            assert (place in found) == (name not in ("train", "step"))


def test_bars_of_the_picture_add_up_to_the_total(drawn):
    _, bars, _ = drawn(made())
    widths = [bar.get_width() for bar in bars.patches]
    assert sum(widths) == pytest.approx(30e3)
    texts = [text.get_text() for text in bars.texts]
    assert texts[0] == "3000 ms, 10.0%"
    assert texts[-1] == "6000 ms, 20.0%"
    assert bars.get_yticklabels()[-1].get_text() == "Block minus parts"


def test_wrong_bandwidth_does_not_stretch_the_picture(drawn):
    _, right, *_ = drawn(made())
    # A copy that is larger than any cache, so that no cache explains a part that is faster.
    ceilings = replace(machine(bytes_per_second=10.0), copy_bytes=2**40)
    _, wrong, *_ = drawn(made(ceilings=ceilings))
    assert wrong.get_xlim() == right.get_xlim()


def test_ceiling_that_is_too_low_is_not_drawn(drawn):
    _, right, *_ = drawn(made())
    roofline, times, *_ = drawn(made(ceilings=machine(flops_per_second=1e3)))
    labels = [text.get_text() for text in roofline.get_legend().get_texts()]
    assert not any(label.startswith("measured") for label in labels)
    assert times.get_xlim() == right.get_xlim()


def test_doubts_stand_in_the_picture(drawn):
    *_, title = drawn(made(trust=DOUBTS, ceilings=machine(1e3, 1e8)))
    assert "Do not trust these figures: threads waited for a core" in title
    assert "The measured ceiling is too low: " in title.replace("\n", " ")
    *_, title = drawn(replace(made(), finished=False))
    assert "Interrupted after 1 size: " in title
    *_, title = drawn(made())
    assert title == describe(SIZE)


def test_gpu_has_a_table_of_its_own_times():
    assert "GPU alone" not in text_of(made())
    samples = samples_of(SIZE, "forward", seconds=1.0, whole=10.0, smallest=0.5)
    gpu = {(name, "forward"): [0.25] for name in SIZE.part_costs(4)}
    gpu["whole", "forward"] = [2.5]
    text = text_of(profile_of(point_of(SIZE, samples, gpu)))
    table = text.partition("Time of the GPU alone")[2]
    assert cells(table, "ffn") == ["ffn", "250", "250 to 250"]
    assert cells(table, "Block") == ["Block", "2500", "2500 to 2500"]
    assert "n/a" not in table.partition("\n\nForward")[0]


def test_gpu_time_of_too_many_launches_is_not_available():
    samples = samples_of(SIZE, "train", seconds=1.0, whole=10.0, smallest=0.5)
    gpu = {key: [0.25] for key in samples if key[0] != "whole"}
    text = text_of(profile_of(point_of(SIZE, samples, gpu), mode="train"))
    table = text.partition("Time of the GPU alone")[2]
    assert "n/a: the GPU began before all was launched" in table
    assert cells(table, "Block") == ["Block", "n/a", "", "n/a", ""]
