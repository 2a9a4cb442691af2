"""Each megatron-core patch has a test here that fails without it, with a toy decoder in Megatron's training stack.

Without CUDA the process groups are gloo and every tensor is in host memory. World size 1 runs in this process, and two
ranks run the toy as a script. The last tests take the patches out again, one at a time.
"""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

HERE = Path(__file__)
SERIES = HERE.parents[2] / "patches" / "megatron-core"
BY_DEVICE = "Found no NVIDIA driver|not compiled with CUDA"
WITHOUT = {
    "fix-device-agnostic-rng": BY_DEVICE,
    "fix-device-agnostic-parallel": BY_DEVICE,
    "fix-device-agnostic-optimizer": BY_DEVICE,
    "fix-device-agnostic-checkpoint": BY_DEVICE,
    "fix-device-agnostic-moe": BY_DEVICE,
    "fix-torch-adam-state-dict": "assert len\\(steps\\) == 1",
    "fix-torch-adam-load-step": "KeyError: 'step'",
    "fix-torch-adam-shared-step": "assert 1 == 8",
    "fix-router-gemm-without-te": "name 'te_general_gemm' is not defined",
}
"""How the test of each patch fails when that patch is missing."""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def world_of(size: int, rank: int, port: int) -> dict[str, str]:
    """The environment of one rank; torch.compile is off because it would compile Megatron's fusions for the host."""
    own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHDYNAMO_DISABLE": 1}
    return {name: str(value) for name, value in own.items()}


@pytest.fixture(scope="module")
def toy():
    """The toy's module, in a world of this process alone."""
    from megatron.core import parallel_state

    spec = importlib.util.spec_from_file_location("megatron_toy", HERE.with_name("megatron_toy.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world_of(1, 0, free_port()).items():
            patch.setenv(name, value)
        patch.setattr("torch._dynamo.config.disable", True)
        joined, threads = torch.distributed.is_initialized(), torch.get_num_threads()
        module.start_world()
        yield module
        parallel_state.destroy_model_parallel()
        if not joined:
            torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


def test_seed_and_recompute_on_the_host(toy: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """Seeding repeats draws, the tracker's streams are apart, and recomputation draws the same dropout again."""
    from megatron.core import tensor_parallel as tp

    def draw():
        with tp.get_cuda_rng_tracker().fork():
            inner = torch.rand(4, device=toy.DEVICE)
        return torch.cat([inner, torch.rand(4, device=toy.DEVICE)])

    draws = []
    for seed in (7, 7, 8):
        tp.model_parallel_cuda_manual_seed(seed)
        draws.append(draw())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2]) and not torch.equal(draws[0][:4], draws[0][4:])

    def noisy(x):
        with tp.get_cuda_rng_tracker().fork():
            x = torch.nn.functional.dropout(x * x, 0.5)
        return torch.nn.functional.dropout(x, 0.5)

    gradients, after = [], []
    for run in (noisy, lambda x: tp.checkpoint(noisy, False, x)):
        tp.model_parallel_cuda_manual_seed(7)
        x = torch.arange(1.0, 65.0, device=toy.DEVICE, requires_grad=True)
        run(x).sum().backward()
        gradients.append(x.grad)
        after.append(draw())
    assert 0 < gradients[0].count_nonzero() < 64
    assert torch.equal(*gradients) and torch.equal(*after)
    assert "RNG state changed" not in caplog.text


def test_schedule_on_the_host(toy: ModuleType) -> None:
    """A schedule accumulates the gradients of its microbatches: those of the whole batch up to rounding."""
    config = toy.new_config()
    scheduled, whole = toy.new_decoder(config), toy.new_decoder(config)
    losses = toy.run_schedule(scheduled, config, step=0)
    assert len(losses) == toy.ROWS
    whole(*toy.batch(0)).mean().backward()
    for ours, theirs in zip(scheduled.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_training_on_the_host(toy: ModuleType) -> None:
    """Each of Megatron's Adam optimizers trains: in fp32 as torch's with clipped gradients, in bf16 close to that."""
    config = toy.new_config()
    model = toy.new_decoder(config)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(4):
        loss = model(*toy.batch(step)).mean()
        plain.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), toy.CLIP) > toy.CLIP
        plain.step()
        expected.append(loss.item())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for distributed in (False, True):
            config = toy.new_config(dtype=dtype)
            losses = toy.train(*toy.new_trainer(config, distributed), config, range(4))
            assert losses == pytest.approx(expected, rel=tolerance), (dtype, distributed)


def test_checkpoint_on_the_host(toy: ModuleType, tmp_path: Path) -> None:
    """Weights come back from a checkpoint bit by bit."""
    saved, loaded = (toy.new_decoder(toy.new_config()) for _ in range(2))
    with torch.no_grad():
        for value in saved.parameters():
            value.add_(torch.randn_like(value))
    toy.save(tmp_path, saved.sharded_state_dict(metadata=toy.sharding()))
    loaded.load_state_dict(toy.load(tmp_path, loaded.sharded_state_dict(metadata=toy.sharding())))
    assert all(torch.equal(*pair) for pair in zip(saved.parameters(), loaded.parameters(), strict=True))


def adam_of(optimizer) -> torch.optim.Optimizer:
    """The optimizer of torch inside a Megatron optimizer."""
    (only,) = getattr(optimizer, "chained_optimizers", [optimizer])
    return only.optimizer


def test_torch_adam_state_dict_before_the_first_step(toy: ModuleType) -> None:
    """A new optimizer says that it has made no step, and is then still new."""
    config = toy.new_config()
    _, optimizer = toy.new_trainer(config, distributed=True)
    groups = optimizer.state_dict()["optimizer"]["param_groups"]
    assert groups and all(group["step"] == 0 for group in groups)
    assert not adam_of(optimizer).state


@pytest.mark.parametrize(
    ("form", "dtype"), [("fully_reshardable", torch.float32), ("dp_reshardable", torch.bfloat16)], ids=["fp32", "bf16"]
)
def test_torch_adam_resumes_bit_equal(toy: ModuleType, tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    """Three steps after a resume are the three steps without it: losses and weights, bit by bit.

    dp_reshardable cannot load parameters that are fp32 themselves: it copies into them with gradients enabled.
    """
    losses = toy.train_and_resume(tmp_path, toy.new_config(dtype=dtype), form)
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_torch_adam_steps_are_not_shared(toy: ModuleType) -> None:
    """After a resume each parameter has its own count, and a step counts once."""
    config = toy.new_config()
    _, optimizer = toy.new_trainer(config, distributed=True)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    counts = [own["step"] for own in adam_of(optimizer).state.values()]
    assert len(counts) == 8
    assert len({count.data_ptr() for count in counts}) == len(counts)


def test_router_without_transformer_engine(toy: ModuleType) -> None:
    """The router's gate multiplies in the dtype of the router."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    tokens, weight = (torch.randn(rows, 16, device=toy.DEVICE, dtype=torch.bfloat16) for rows in (3, 4))
    logits = router_gating_linear(tokens, weight, None, torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, tokens.float() @ weight.float().T)


def test_alltoall_dispatcher_on_the_host(toy: ModuleType) -> None:
    """Tokens that are routed, dispatched, scaled by their expert and combined are the weighted sum over experts."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    config = toy.new_config(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
    )
    groups = moe_utils.get_default_pg_collection()
    router = TopKRouter(config, pg_collection=groups)
    router.set_layer_number(1)
    dispatcher = MoEAlltoAllTokenDispatcher(4, list(range(4)), config, pg_collection=groups)
    hidden, scale = torch.randn(8, 2, 16, device=toy.DEVICE), torch.arange(1.0, 5.0, device=toy.DEVICE)
    weight, chosen = router(hidden)
    assert chosen.sum() == 2 * 16 and len(chosen.unique(dim=0)) > 1

    own, own_weight = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, chosen, weight))
    own, counts, own_weight = dispatcher.dispatch_postprocess(own, own_weight)
    own = own * (own_weight * scale.repeat_interleave(counts.to(toy.DEVICE)))[:, None]
    own = dispatcher.token_combine(dispatcher.combine_preprocess(own))
    expected = hidden.view(16, 16) * (weight * scale).sum(-1, keepdim=True)
    torch.testing.assert_close(dispatcher.combine_postprocess(own).view(16, 16), expected)
    splits = moe_utils.maybe_move_tensor_to_cpu(counts, as_numpy=True)
    assert toy.DEVICE.type == "cuda" or splits.tolist() == counts.tolist() and not torch.is_tensor(splits)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL wants a GPU for each of the two ranks")
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_two_ranks_equal_one(toy: ModuleType, tmp_path: Path, layout: str) -> None:
    """Split over two ranks, with full recomputation, losses agree to seven digits; the resume inside is bit-equal."""
    expected = toy.train_and_resume(tmp_path / "one", toy.new_config(), "fully_reshardable")
    port, script = free_port(), HERE.with_name("megatron_toy.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, layout, tmp_path / "two"],
            env=os.environ | world_of(2, rank, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors[-3000:] for _, errors in said)
    losses = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert losses[1] == pytest.approx(expected, rel=1e-6)
    assert losses[0] == ([] if layout == "pp2" else losses[1])


def git_apply(tree: Path, *arguments: str) -> None:
    """git apply in a folder that is in no repository; the module of device functions stays in any case."""
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    subprocess.run(["git", "apply", "--exclude=megatron/core/device.py", *arguments], cwd=tree, env=alone, check=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed, patched megatron-core to import instead of it."""
    installed = Path(importlib.util.find_spec("megatron.core").origin).parent
    copy = tmp_path_factory.mktemp("patched")
    shutil.copytree(installed, copy / "megatron" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT)
def test_each_patch_is_needed(tree: Path, name: str) -> None:
    """With all patches but one, the test that this one names fails, and for the reason that the patch removes."""
    if WITHOUT[name] == BY_DEVICE and torch.cuda.is_available():
        pytest.skip("without this patch nothing fails where there is CUDA")
    patch = SERIES / f"{name}.patch"
    (test,) = re.findall(r"^Test: (\S+)$", patch.read_text(), flags=re.MULTILINE)
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    git_apply(tree, "--reverse", str(patch))
    try:
        run = subprocess.run(
            command,
            cwd=HERE.parents[2],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        git_apply(tree, str(patch))
    assert run.returncode == 1, run.stdout[-3000:]
    assert re.search(WITHOUT[name], run.stdout), run.stdout[-3000:]


def test_every_patch_is_taken_out_once() -> None:
    """The table above is the series."""
    assert sorted(WITHOUT) == sorted(name.removesuffix(".patch") for name in (SERIES / "series").read_text().split())
