import model_exactness
import pytest
import torch
from markdown_tables import table_rows

pytest.importorskip("gguf", reason="needs gguf")
pytest.importorskip("transformers", reason="needs transformers")
from peers import real_model

# The imports of transformers warn.
pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning", "default::FutureWarning"
)


def test_relative_is_the_root_mean_square_error():
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    actual = torch.tensor([3.0, 4.5])
    assert real_model.relative(actual, expected) == pytest.approx(0.5 / 5)


@pytest.mark.parametrize(
    ("function", "dependent"),
    [
        (lambda x: 2 * x, []),
        (lambda x: x - x.mean(0), ["in a batch"]),
        (lambda x: x - x.mean(1, keepdim=True), ["as a prefix", "from a cache"]),
    ],
    ids=["neither", "batch", "sequence"],
)
def test_compare_finds_what_a_result_depends_on(function, dependent):
    x = torch.randn(3, real_model.PREFIX + 5, 4)
    found = real_model.compare(real_model.Layer(lambda: function), x)
    assert [each for each in found if found[each] > 1e-3] == dependent
    assert all(found[each] == 0 for each in found if each not in dependent)


@torch.no_grad()
def test_layers_of_both_projects_compute_the_same(tmp_path):
    import hugging_face
    from language_model import LanguageModel

    model = LanguageModel(99, 2, 64, 4, max_seq_len=256, num_kv_heads=2)
    hugging_face.save(model, tmp_path)
    ours = real_model.our_layers(model)
    theirs = real_model.their_layers(
        real_model.load_theirs(tmp_path, torch.float32).eval()
    )
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        x = torch.randn(2, 120, 64)
        if name == "the model":
            x = torch.randint(99, (2, 120))
        expected = theirs[name].whole(x)
        torch.testing.assert_close(layer.whole(x), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(layer.decoded(x), expected, rtol=0, atol=2e-5)
        decoded = theirs[name].decoded(x)
        torch.testing.assert_close(decoded, expected, rtol=0, atol=2e-5)


def test_errors_have_medians_ranges_and_ratios():
    errors = {}
    for dtype in real_model.DTYPES:
        for start in real_model.STARTS:
            errors[dtype, start, real_model.OURS] = [1e-6, 2e-6, 3e-6]
            errors[dtype, start, real_model.THEIRS] = [4e-6, 8e-6, 12e-6]
    _, _, ours, _, ratios = table_rows(model_exactness.errors_table(errors))
    columns = len(real_model.DTYPES) * len(real_model.STARTS)
    assert ours[1:] == ["2.0e-06 (1.0e-06-3.0e-06)"] * columns
    assert ratios[1:] == ["0.25 (0.25-0.25)"] * columns


def test_invariance_shows_what_is_equal_and_how_far_the_rest_is():
    differences = {}
    for condition in real_model.CONDITIONS:
        differences["Block", "float32", real_model.OURS, condition] = 0.0
        differences["Block", "float32", real_model.THEIRS, condition] = 0.0
    differences["Block", "float32", real_model.THEIRS, "from a cache"] = 3.4e-7
    _, _, row = table_rows(model_exactness.invariance_table(differences))
    assert row[1:] == ["equal"] * 5 + ["3e-07"]


def test_main_reports_a_missing_model(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        model_exactness.main(["--model", str(tmp_path / "none.gguf")])
    assert ended.value.code == 2
    assert "run `make story`" in capsys.readouterr().err


def test_model_must_be_a_gguf_file(tmp_path, capsys):
    other = tmp_path / "notes.txt"
    other.write_text("no model")
    with pytest.raises(SystemExit, match="2"):
        model_exactness.main(["--model", str(other)])
    assert f"--model must be a GGUF file, got {other}" in capsys.readouterr().err
