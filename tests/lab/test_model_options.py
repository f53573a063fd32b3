"""The options of a model's size, and the sizes that they give."""

from dataclasses import replace

import pytest
from lab.cli import Parser
from lab.model_options import add_size_options, sizes_of
from lab.sizes import Size

BLOCK_OF_LLAMA_8B = Size(
    batch_size=1,
    seq_len=128,
    d_model=4096,
    num_heads=32,
    num_kv_heads=8,
    d_head=128,
    d_ff=14336,
    theta=500000.0,
)


def sizes(*options):
    parser = Parser("program.py", "", "")
    add_size_options(parser, preset_help="a model", layers_help="blocks")
    return sizes_of(parser.parse_args(options))


def size(*options):
    (only,) = sizes(*options)
    return only


def test_defaults_are_a_block_of_width_512():
    # 8/3 of 512 is 1365.3, and the nearest multiple of 64 is 1344.
    assert size() == Size(
        batch_size=1,
        seq_len=128,
        d_model=512,
        num_heads=8,
        num_kv_heads=8,
        d_head=64,
        d_ff=1344,
    )


def test_preset_gives_every_size_of_the_block():
    assert size("--preset=llama-3.1-8b") == BLOCK_OF_LLAMA_8B


def test_options_override_the_preset():
    expected = replace(BLOCK_OF_LLAMA_8B, seq_len=7, d_ff=64, num_layers=2)
    options = ["--seq-len=7", "--d-ff=64", "--num-layers=2"]
    assert size("--preset=llama-3.1-8b", *options) == expected


def test_another_width_leaves_out_what_belongs_to_that_of_the_preset():
    expected = replace(BLOCK_OF_LLAMA_8B, d_model=512, d_head=16, d_ff=1344)
    assert size("--preset=llama-3.1-8b", "--d-model=512") == expected


def test_other_heads_leave_out_what_belongs_to_those_of_the_preset():
    expected = replace(BLOCK_OF_LLAMA_8B, num_heads=64, num_kv_heads=64, d_head=64)
    assert size("--preset=llama-3.1-8b", "--num-heads=64") == expected


def test_norm_of_queries_and_keys_can_be_turned_on_and_off():
    assert size("--preset=qwen3-8b").qk_norm
    assert not size("--preset=qwen3-8b", "--no-qk-norm").qk_norm
    assert size("--preset=llama-3.1-8b", "--qk-norm").qk_norm


def test_preset_keeps_its_epsilon_and_theta():
    qwen = size("--preset=qwen3-8b", "--d-model=64", "--num-heads=4")
    assert (qwen.eps, qwen.theta) == (1e-6, 1e6)


def test_sweep_replaces_one_option():
    swept = sizes("--preset=llama-3.1-8b", "--seq-len=9", "--sweep=batch-size=2,4")
    expected = replace(BLOCK_OF_LLAMA_8B, seq_len=9)
    assert swept == [replace(expected, batch_size=count) for count in (2, 4)]


def test_sweep_of_the_width_has_the_default_of_d_ff_for_each():
    assert [each.d_ff for each in sizes("--sweep=d-model=64,512")] == [192, 1344]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        pytest.param(
            "--d-model=17",
            "^--d-model 17 must be a multiple of --num-heads 8: "
            "change one of them, or pass --d-head$",
            id="not a multiple of the heads",
        ),
        pytest.param(
            f"--d-model={2**63}", "--d-model must be below", id="above 64 bits"
        ),
        pytest.param(f"--seq-len={2**62}", "impossible size", id="too large for torch"),
        pytest.param(
            "--d-head=3",
            "^--d-head must be even for RoPE, got 3: "
            "change --d-head, or --d-model and --num-heads$",
            id="odd head size",
        ),
    ],
)
def test_size_that_cannot_be_built_is_rejected(option, message):
    with pytest.raises(ValueError, match=message):
        sizes(option)


@pytest.mark.parametrize(
    "text", ["d-ff=16", "seq-len", "seq-len=8,x", "seq-len=0", "seq-len=8,8"]
)
def test_sweep_that_cannot_be_read_is_rejected(text, capsys):
    with pytest.raises(SystemExit):
        sizes(f"--sweep={text}")
    assert "argument --sweep: must " in capsys.readouterr().err
