import pytest
import torch

pytest.importorskip("gguf", reason="needs gguf")
pytest.importorskip("transformers", reason="needs transformers")
import from_gguf
import gguf
import transformers

pytestmark = pytest.mark.filterwarnings(
    "default::DeprecationWarning", "default::FutureWarning"
)  # of transformers' imports

# The names of weights that llama.cpp gives to those of transformers.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up",
}
FIELDS = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 300.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 99,
}


def random_llama(**options):
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=300.0,
        initializer_range=0.15,  # logits of about 1
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def write(path, fields=FIELDS, weights=None, architecture="llama"):
    """Write a GGUF file as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(name, value)
    for name, weight in (weights or {}).items():
        for theirs, new in NAMES.items():
            name = name.replace(theirs, new)
        weight = weight.numpy()
        if "attn_q" in name or "attn_k" in name:
            heads = weight.reshape(-1, 2, 8, 64)
            weight = heads.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights_of(model):
    return {name: weight.detach() for name, weight in model.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_load_gives_the_logits_of_transformers(tied, tmp_path):
    theirs = random_llama(tie_word_embeddings=tied)
    ours = from_gguf.load(write(tmp_path / "m.gguf", weights=weights_of(theirs)))
    assert ours.tied == tied
    tokens = torch.randint(99, (2, 60))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=2e-5)


def test_load_dequantizes(tmp_path):
    weights = weights_of(random_llama())
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    quantized = gguf.quantize(
        weights["lm_head.weight"].numpy(), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor(
        "output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = from_gguf.read_weights(from_gguf.open_file(path))["lm_head.weight"]
    original = weights["lm_head.weight"].view(-1, 32)  # a scale for each 32 weights
    step = original.abs().amax(-1, keepdim=True) / 127
    # Half a step, and the rounding of the scale to float16, which counts up to 127 times.
    allowed = (0.5 + 127 * 2**-11) * step
    error = (read.view(-1, 32) - original).abs()
    assert (error <= allowed).all()
    assert error.max() > 0


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"llama.rope.scaling.type": "linear"}, "must be none, got linear"),
        ({"llama.rope.scaling.factor": 4.0}, "must be 1.0, got 4.0"),
        ({"llama.rope.dimension_count": 8}, "dimension_count must be 16, got 8"),
        ({"llama.attention.value_length": 8}, "value_length must be 16, got 8"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window is unknown"),
        ({"llama.expert_count": 8}, "expert_count must be 0, got 8"),
        ({"llama.logit_scale": 2.0}, "logit_scale is unknown"),
        ({"split.count": 2}, "split.count is unknown"),
    ],
    ids=str,
)
def test_load_rejects_fields_that_change_the_results(field, message, tmp_path):
    path = write(tmp_path / "m.gguf", {**FIELDS, **field}, weights_of(random_llama()))
    with pytest.raises(ValueError, match=message) as raised:
        from_gguf.load(path)
    assert "\n" not in str(raised.value)


def test_load_rejects_other_architectures_and_weights(tmp_path):
    with pytest.raises(ValueError, match="must be llama, got qwen2"):
        from_gguf.load(write(tmp_path / "qwen.gguf", architecture="qwen2"))
    with pytest.raises(ValueError, match="must have the fields llama"):
        from_gguf.load(write(tmp_path / "empty.gguf", {}))
    weights = {**weights_of(random_llama()), "rope_freqs.weight": torch.ones(8)}
    with pytest.raises(ValueError, match="unknown: rope_freqs"):
        from_gguf.load(write(tmp_path / "m.gguf", weights=weights))


def test_main_reports_a_file_that_is_no_model(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["from_gguf.py", *map(str, arguments)])
        return from_gguf.main(), capsys.readouterr()

    assert run()[0] == 2
    code, output = run(tmp_path / "none.gguf")
    assert code == 2
    assert output.err.endswith("none.gguf: No such file or directory\n")
    (tmp_path / "text.gguf").write_text("not a model, but a text")
    code, output = run(tmp_path / "text.gguf")
    assert code == 2
    assert "must be a complete GGUF file" in output.err
    path = write(tmp_path / "m.gguf", weights=weights_of(random_llama()))
    whole = path.read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    code, output = run(tmp_path / "half.gguf")
    assert code == 2
    assert "must be a complete GGUF file" in output.err
    code, output = run(path)
    assert code == 0
    assert output.out.endswith("parameters\n")
