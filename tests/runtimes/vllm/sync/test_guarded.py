"""What a guarded engine refuses of requests that are scored, and what takes its weights out of service."""

import pytest

torch = pytest.importorskip("torch")


def test_scored_requests_sample_from_the_contract(driver, prompts, generate) -> None:
    """The contract's temperature and nothing beside it, unless nobody scores the tokens; each says which it is."""
    driver.sync(1, seed=0)
    assert generate(driver.engine, prompts[:1], top_k=-1, **driver.epoch(1))
    other = {"temperature": 0.7, "top_p": 0.9, "min_tokens": 3}
    assert generate(driver.engine, prompts[:1], **other, **driver.epoch(1, scored=False))
    for number, (name, value) in enumerate(other.items()):
        driver.drop()
        driver.sync(number + 2, seed=0)
        with pytest.raises(
            RuntimeError, match=f"isoexec refused: request .*sampling_params.{name} is {value}.*contract"
        ):
            generate(driver.engine, prompts[:1], **{name: value}, **driver.epoch(number + 2))
    driver.drop()
    driver.sync(9, seed=0)
    with pytest.raises(RuntimeError, match="isoexec_scored is None, neither True nor False"):
        generate(driver.engine, prompts[:1], extra_args={"isoexec_epoch": 9})


@pytest.mark.parametrize("method", ["update_weights", "finish_weight_update", "reload_weights", "apply_model"])
def test_whatever_writes_weights_leaves_nothing_proven(driver, method: str) -> None:
    """Before vLLM does it, and even if it fails; between the digests and the commit, and after the commit."""
    from skyrl_isoexec.contract import digest

    arguments = {"update_weights": ({},), "apply_model": (lambda model: None,)}.get(method, ())
    failing = method not in ("apply_model", "reload_weights")

    def write() -> None:
        if failing:
            with pytest.raises(RuntimeError):
                driver.engine.collective_rpc(method, args=arguments)
        else:
            driver.engine.collective_rpc(method, args=arguments)

    driver.sync(1, seed=1)
    driver.call("isoexec_begin_sync", 2)
    driver.call("isoexec_arrived")
    write()
    with pytest.raises(RuntimeError, match="weights of epoch 2 were written after their digests were read"):
        driver.call("isoexec_commit", 2, digest(driver.contract))
    driver.sync(2, seed=1)
    write()
    (left,) = driver.engine.collective_rpc(lambda worker: (worker.isoexec_guard.epoch, worker.isoexec_guard.reason))
    assert left == (None, "weights were written outside a weight sync")


def test_putting_in_place_is_a_write(driver) -> None:
    """However a host ends an update, what it held back is put in place by the loader."""
    driver.sync(1, seed=1)
    driver.engine.collective_rpc(lambda worker: worker.model_runner.get_model().loader.finish())
    assert driver.engine.collective_rpc(lambda worker: worker.isoexec_guard.epoch) == [None]
