"""How a runtime may cut the work of a decoder; that no cut changes a bit of the forward is proved by its gate."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recompute


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def decoder(request, m):
    """A loaded decoder with 4 leaves."""
    return m.build(*m.toy(dtype=request.param, tied_head=True), num_leaves=4)


@torch.no_grad()
def test_packed_weights_change_nothing_and_stay_in_place(m) -> None:
    config, tensors = m.toy()
    decoder = m.build(config, tensors)
    before = m.forward(decoder)
    decoder.refresh_packed()
    places = {name: part.packed.data_ptr() for name, part in decoder.named_modules() if hasattr(part, "packed")}
    m.assert_same_bits(m.forward(decoder), before)
    for p in decoder.parameters():
        p.mul_(-0.5)
    decoder.refresh_packed()
    assert places == {name: part.packed.data_ptr() for name, part in decoder.named_modules() if hasattr(part, "packed")}
    changed = {name: -0.5 * tensor for name, tensor in tensors.items()}
    m.assert_same_bits(m.forward(decoder), m.forward(m.build(config, changed)))


def test_recomputed_layers_give_the_same_bits(decoder, m) -> None:
    ids, positions, cu_seqlens = m.pack(m.SEQUENCES)
    attend = m.packed_attend(decoder, cu_seqlens)

    def run(call):
        decoder.zero_grad()
        x = decoder.embed(ids)
        for index in decoder.layer_indices:
            x = call(decoder.layer, index, x, positions, attend)
        logits = decoder.full_logits(x)
        m.loss_of(logits).backward()
        return [logits.detach()] + [p.grad.clone() for p in decoder.parameters()]

    plain = run(lambda layer, *given: layer(*given))
    again = run(lambda layer, *given: recompute(layer, *given, use_reentrant=False))
    for a, b in zip(plain, again, strict=True):
        m.assert_same_bits(a, b)


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_compose(m, tied) -> None:
    config, tensors = m.toy(tied_head=tied, num_layers=3)
    whole = m.build(config, tensors)
    first = m.build(config, tensors, last_layer=2, with_head=False)
    last = m.build(config, tensors, first_layer=2, with_embedding=False)
    ids, positions, cu_seqlens = m.pack(m.SEQUENCES)
    x = first.layers(first.embed(ids), positions, m.packed_attend(first, cu_seqlens))
    logits = last.full_logits(last.layers(x, positions, m.packed_attend(last, cu_seqlens)))
    m.assert_same_bits(logits, m.forward(whole))
    names = [name for stage in (first, last) for name, p in stage.named_parameters() if not hasattr(p, "tied_to")]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert getattr(last.lm_head.weight, "tied_to", None) == ("model.embed_tokens.weight" if tied else None)


def test_layers_out_of_range_are_refused(m) -> None:
    with pytest.raises(ValueError, match="0 .. 2"):
        m.build(*m.toy(), last_layer=3)
