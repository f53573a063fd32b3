"""Each repair that an error about a mask names is right, and following it once is enough."""

import math
import re

import pytest
import torch

from tinyblock import CausalMultiHeadSelfAttention

SEQ = 7
each_batch = pytest.mark.parametrize("batch", [(), (2,), (2, 3), (5, 1)], ids=str)


def as_bool(mask):
    return mask


def as_long(mask):
    return mask.long()


def as_ones(mask):
    return mask.float()


def as_additive(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


each_dtype = pytest.mark.parametrize("store", [as_bool, as_long, as_ones, as_additive])


def random_mask(*shape):
    """Hide the second key, and 4 in 10 of those after it."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    mask[..., 1] = False
    return mask


def attend(layer, x, mask):
    """Return what the layer must compute, by the equation of causal attention."""

    def heads_of(projection):
        return projection(x).unflatten(-1, (layer.num_heads, -1)).transpose(-3, -2)

    q, k, v = map(heads_of, (layer.q_proj, layer.k_proj, layer.v_proj))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    shown = mask.unsqueeze(-3) & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    weights = scores.masked_fill(~shown, -math.inf).softmax(-1)
    return layer.output_proj((weights @ v).transpose(-3, -2).flatten(-2))


def padding(batch):
    keep = random_mask(*batch, SEQ)
    return keep, keep[..., None, :]


def one_padding_for_all(batch):
    keep = random_mask(SEQ)
    return keep, keep[None]


def with_axis_of_heads(batch):
    mask = random_mask(*batch, SEQ, SEQ)
    return mask.unsqueeze(-3), mask


def padding_with_axis_of_heads(batch):
    keep = random_mask(*batch, 1, SEQ)
    return keep.unsqueeze(-3), keep


each_shape = pytest.mark.parametrize(
    "shape",
    [padding, one_padding_for_all, with_axis_of_heads, padding_with_axis_of_heads],
)


def results_of_repairs(layer, x, mask):
    """Return the result for each mask that the error says to pass, by its words."""
    with pytest.raises(ValueError, match="mask must be bool") as error:
        layer(x, mask=mask)
    message = str(error.value)
    assert ": pass " in message, f"the error has no repair: {message}"
    results = {}
    for repair in message.partition(": pass ")[2].split(", or "):
        code = re.match(r"(mask\.bool\(\)|\(mask == 0\)|mask)(\[.*?\])?", repair)[0]
        pasted = eval(code, {"mask": mask})
        results[repair] = layer(x, mask=pasted)
    return results


def the_one_for(store, results):
    """Return the result of the repair for masks that are stored like this."""
    meanings = {as_ones: "if 1 means attend", as_additive: "if 0 means attend"}
    meaning = meanings.get(store, "")
    found = [repair for repair in results if repair.endswith(meaning)]
    assert len(found) == 1, f"one repair must end with {meaning!r}: {list(results)}"
    return results[found[0]]


@each_dtype
@each_batch
@each_shape
def test_a_mask_of_other_axes_gets_its_repair(shape, batch, store):
    layer = CausalMultiHeadSelfAttention(24, 4)
    x = torch.randn(*batch, SEQ, 24)
    given, right = shape(batch)
    results = results_of_repairs(layer, x, store(given))
    result = the_one_for(store, results)
    torch.testing.assert_close(result, attend(layer, x, right))


@each_batch
@pytest.mark.parametrize("store", [as_long, as_ones, as_additive])
@pytest.mark.parametrize("queries", [1, SEQ])
def test_a_mask_of_another_dtype_gets_its_repair(queries, store, batch):
    layer = CausalMultiHeadSelfAttention(24, 4)
    x = torch.randn(*batch, SEQ, 24)
    right = random_mask(*batch, queries, SEQ)
    result = the_one_for(store, results_of_repairs(layer, x, store(right)))
    torch.testing.assert_close(result, attend(layer, x, right))


@each_dtype
@pytest.mark.parametrize("batch", [(SEQ,), (SEQ, SEQ), (1, SEQ)], ids=str)
def test_as_many_sequences_as_tokens_get_both_repairs(batch, store):
    """A mask may be for padding, or have a row for each query: the error has both."""
    mask = random_mask(*batch, SEQ)
    layer = CausalMultiHeadSelfAttention(24, 4)
    x = torch.randn(*batch, SEQ, 24)
    results = results_of_repairs(layer, x, store(mask))
    meanings = {
        "for padding": mask[..., None, :],
        "for all sequences": mask[None],
    }
    for meaning, right in meanings.items():
        chosen = {text: result for text, result in results.items() if meaning in text}
        result = the_one_for(store, chosen)
        torch.testing.assert_close(result, attend(layer, x, right))


@pytest.mark.parametrize(
    "shape", [(), (8,), (3, 7), (7, 1), (3, 7, 7), (2, 4, 7, 7), (3, 1, 7, 7)], ids=str
)
def test_a_mask_whose_meaning_is_unclear_gets_no_repair(shape):
    layer = CausalMultiHeadSelfAttention(24, 4)
    with pytest.raises(ValueError, match=re.escape(str(shape)) + "$"):
        layer(torch.randn(2, SEQ, 24), mask=torch.ones(shape) > 0)


def test_padding_of_one_sequence_needs_no_axis_for_queries():
    layer = CausalMultiHeadSelfAttention(24, 4)
    x = torch.randn(1, SEQ, 24)
    keep = random_mask(1, SEQ)
    torch.testing.assert_close(layer(x, mask=keep), attend(layer, x, keep[:, None]))
