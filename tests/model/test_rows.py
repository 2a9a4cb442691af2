"""How a runtime may cut the work of a decoder; that no cut changes a bit of the forward is proved by its gate."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute

from skyrl_isoexec.model.decoder import Decoder

FAMILIES = ["qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe"]


@pytest.fixture(scope="module", params=itertools.product(FAMILIES, ["float32", "bfloat16"]), ids="-".join)
def decoder(request, m):
    """A loaded decoder with 4 leaves."""
    family, dtype = request.param
    return m.build(*m.toy(family, dtype=dtype, tied_head=True), num_leaves=4)


def addresses(decoder: Decoder) -> dict[str, int]:
    """Where each derived layout is."""
    layers = {name: part for name, part in decoder.named_modules() if hasattr(part, "refresh_packed")}
    return {name: part.packed.data_ptr() for name, part in layers.items() if part is not decoder}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_weights_change_nothing_and_stay_in_place(m, family) -> None:
    config, tensors = m.toy(family)
    decoder = m.build(config, tensors)
    before = m.forward(decoder)
    decoder.refresh_packed()
    places = addresses(decoder)
    assert len(places) == sum(p.dim() == 2 for p in decoder.parameters()) - 1  # all matrices but the embedding
    m.assert_same_bits(m.forward(decoder), before)
    for p in decoder.parameters():
        p.mul_(-0.5)
    decoder.refresh_packed()
    assert addresses(decoder) == places
    changed = {name: -0.5 * tensor for name, tensor in tensors.items()}
    m.assert_same_bits(m.forward(decoder), m.forward(m.build(config, changed)))


def test_recomputed_layers_give_the_same_bits(decoder, m) -> None:
    ids, positions, cu_seqlens = m.pack(m.SEQUENCES)
    sequences = decoder.end_to_end(cu_seqlens)

    def run(call):
        decoder.zero_grad()
        x = decoder.embed(ids)
        for index in decoder.layer_indices:
            x = call(decoder.layer, index, x, positions, sequences)
        logits = decoder.full_logits(x)
        m.loss_of(logits).backward()
        return [logits.detach()] + [p.grad.clone() for p in decoder.parameters()]

    plain = run(lambda layer, *given: layer(*given))
    repeated = run(lambda layer, *given: layer(*given))
    again = run(lambda layer, *given: recompute(layer, *given, use_reentrant=False))
    for a, b, c in zip(plain, repeated, again, strict=True):
        m.assert_same_bits(a, b)
        m.assert_same_bits(a, c)


@torch.no_grad()
def test_neighbours_change_nothing(decoder, m) -> None:
    """A sequence alone, and all of them in the opposite order."""
    parts = m.forward(decoder).split([len(sequence) for sequence in m.SEQUENCES])
    assert max(len(sequence) for sequence in m.SEQUENCES) > decoder.schedule.gdn_chunk
    for sequence, part in zip(m.SEQUENCES, parts, strict=True):
        m.assert_same_bits(m.forward(decoder, [sequence]), part)
    m.assert_same_bits(m.forward(decoder, m.SEQUENCES[::-1]), torch.cat(parts[::-1]))


@torch.no_grad()
def test_later_rows_change_nothing(decoder, m) -> None:
    """A sequence with other tokens after it, such as padding."""
    sequence = m.SEQUENCES[3]
    whole = m.forward(decoder, [sequence])
    for length in (1, 15, 16, 17, len(sequence) - 1):
        m.assert_same_bits(m.forward(decoder, [sequence[:length] + [30] * 20])[:length], whole[:length])


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("family, tied", itertools.product(FAMILIES, [False, True]))
def test_pipeline_stages_compose(m, family, tied, cut) -> None:
    config, tensors = m.toy(family, tied_head=tied, num_layers=3)
    whole = m.build(config, tensors)
    first = m.build(config, tensors, last_layer=cut, with_head=False)
    last = m.build(config, tensors, first_layer=cut, with_embedding=False)
    ids, positions, cu_seqlens = m.pack(m.SEQUENCES)
    x = first.layers(first.embed(ids), positions, first.end_to_end(cu_seqlens))
    logits = last.full_logits(last.layers(x, positions, last.end_to_end(cu_seqlens)))
    m.assert_same_bits(logits, m.forward(whole))
    names = [name for stage in (first, last) for name, p in stage.named_parameters() if not hasattr(p, "tied_to")]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert getattr(last.lm_head.weight, "tied_to", None) == ("model.embed_tokens.weight" if tied else None)


def test_layers_out_of_range_are_refused(m) -> None:
    with pytest.raises(ValueError, match="0 .. 2"):
        m.build(*m.toy(), last_layer=3)
