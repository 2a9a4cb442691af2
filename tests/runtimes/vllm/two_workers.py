"""A program, run by test_parallel.py: an engine of two workers generates, takes an update and generates again.

The task is JSON in the only argument; the result is the line of standard output that starts with RESULT.
"""

import json
import socket
import sys
import threading
from typing import Any


def run(engine: Any, prompts: list[list[int]], epoch: int) -> list[dict[str, Any]]:
    """Sampled tokens, and their log-probabilities as numbers, from weights of `epoch`."""
    from vllm import SamplingParams

    extra = {"isoexec_epoch": epoch, "isoexec_scored": True}
    params = SamplingParams(max_tokens=32, logprobs=0, ignore_eos=True, seed=5, extra_args=extra)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    sampled = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(one.token_ids),
            "logprobs": [step[t].logprob for t, step in zip(one.token_ids, one.logprobs, strict=True)],
        }
        for one in sampled
    ]


def update(engine: Any, folder: str) -> None:
    """One update from a trainer in this process to both workers."""
    from skyrl_isoexec.model.checkpoint import iter_tensors
    from skyrl_isoexec.runtimes.vllm.transfer import GlooTransfer

    tensors = dict(iter_tensors(folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        info = {"master_address": "127.0.0.1", "master_port": free.getsockname()[1], "world_size": 3}

    def send() -> None:
        group = GlooTransfer.trainer_init(info)
        GlooTransfer.trainer_send_weights(iter(tensors.items()), {"group": group, "packed": True})

    trainer = threading.Thread(target=send)
    trainer.start()
    engine.init_weight_transfer_engine({"init_info": info | {"rank_offset": 1}})
    engine.start_weight_update(is_checkpoint_format=True)
    engine.update_weights(
        {
            "update_info": {
                "names": list(tensors),
                "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
                "shapes": [list(t.shape) for t in tensors.values()],
                "packed": True,
            }
        }
    )
    trainer.join(60)
    engine.finish_weight_update()
    engine.reset_prefix_cache()


def main(task: dict[str, Any]) -> dict[str, Any]:
    """The whole program."""
    from vllm import LLM

    engine = LLM(task["checkpoint"], **task["arguments"])
    engine.collective_rpc("isoexec_begin_sync", args=(0,))  # of the weights that it has loaded
    engine.collective_rpc("isoexec_arrived")
    engine.collective_rpc("isoexec_commit", args=(0, task["contract"]))
    before = run(engine, task["prompts"], 0)
    engine.collective_rpc("isoexec_begin_sync", args=(1,))
    update(engine, task["new_checkpoint"])
    arrived = engine.collective_rpc("isoexec_arrived")
    engine.collective_rpc("isoexec_commit", args=(1, task["contract"]))
    return {
        "before": before,
        "after": run(engine, task["prompts"], 1),
        "facts": engine.collective_rpc("isoexec_facts"),
        "served": engine.collective_rpc("isoexec_served"),
        "arrived": arrived,
    }


if __name__ == "__main__":
    print("RESULT" + json.dumps(main(json.loads(sys.argv[1]))))
