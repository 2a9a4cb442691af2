"""How a hybrid's cache is paged: what is said beforehand is what vLLM does, and anything else is refused by name."""

import pytest

torch = pytest.importorskip("torch")

SCHEDULE = {"num_leaves": 2, "kv_block": 16, "kv_partition": 512}


@pytest.fixture
def config(hybrid):
    """config(dtype, **changes) -> DecoderConfig of the small hybrid."""
    from skyrl_isoexec.model.families import from_hf

    common = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    return lambda dtype, **changes: from_hf(common | hybrid | {"dtype": dtype} | changes)


def kernels(chunk: int = 64, op: str = "gdn"):
    """Only what has states."""
    from skyrl_isoexec.runtimes.vllm.pages import state_kernels
    from skyrl_isoexec.schedule import Schedule

    return state_kernels({op: "cpu"}, Schedule(**SCHEDULE, gdn_chunk=chunk))


@pytest.mark.parametrize(("dtype", "tp", "chunk", "size"), [
    ("float32", 1, 64, 64), ("float32", 2, 64, 64), ("bfloat16", 1, 64, 128), ("bfloat16", 2, 64, 128),
    ("float32", 1, 16, 16), ("float32", 1, 32, 32), ("float32", 1, 128, 256),
])  # fmt: skip
def test_the_smallest_page(config, dtype: str, tp: int, chunk: int, size: int) -> None:
    """Whole chunks, in whose bytes of keys and values a state fits; one chunk less, and it does not."""
    from skyrl_isoexec.runtimes.vllm.pages import hybrid_page_size, state_bytes, token_bytes

    made, own = config(dtype), kernels(chunk)
    assert hybrid_page_size(made, tp, own) == size
    assert (size - chunk) * token_bytes(made, tp) < state_bytes(made, tp, own) <= size * token_bytes(made, tp)


def test_states_of_a_process_that_computes_nothing(config) -> None:
    """Of all names given only one operator is loaded; without it there is no size."""
    from skyrl_isoexec.runtimes.vllm.pages import hybrid_page_size, state_kernels
    from skyrl_isoexec.schedule import Schedule

    assert state_kernels("cpu", Schedule()).impls == {"gdn": "cpu"}
    with pytest.raises(ValueError, match="gdn_states was called, but no implementation of gdn was chosen"):
        hybrid_page_size(config("float32"), 1, state_kernels({"linear": "cpu"}, Schedule()))


SHAPES = {
    "one of four": (4, 4, True),
    "one of two": (4, 2, True),
    "a group of two": (8, 4, True),
    "padded": (5, 2, True),
    "no prefix cache": (8, 4, False),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_pages_as_said(start, checkpoint, hybrid, shape: str) -> None:
    """Groups, bytes and pages of a sequence, read back from an engine with just enough of them; with one less it does
    not start."""
    from skyrl_isoexec.model.checkpoint import read_config
    from skyrl_isoexec.model.families import from_hf
    from skyrl_isoexec.runtimes.vllm.pages import groups, page_bytes, pages_of_sequence
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    layers, interval, caching = SHAPES[shape]
    changes = hybrid | {"num_hidden_layers": layers, "full_attention_interval": interval}
    folder, pages = checkpoint("float32", **changes), HybridPages(page_size=64, prefix_caching=caching)
    made = from_hf(read_config(folder))
    needed = pages_of_sequence(made, 64, 256, caching)
    sizes = {"enable_prefix_caching": caching, "num_gpu_blocks_override": needed}
    engine = start(folder, "float32", family="qwen3_5", pages=pages, **sizes)
    (cache,) = engine.collective_rpc(lambda worker: worker.model_runner.kv_cache_config)
    size, attention, recurrent = groups(made)
    names = [list(group.layer_names) for group in cache.kv_cache_groups]
    assert max(map(len, names)) == size and sum(map(len, names)) == layers
    assert [sum("self_attn" in n[0] for n in names), sum("linear_attn" in n[0] for n in names)] == [
        attention,
        recurrent,
    ]
    assert sum(tensor.size for tensor in cache.kv_cache_tensors) == needed * page_bytes(made, 1, 64)
    live = engine.llm_engine.vllm_config.cache_config
    assert (live.block_size, live.mamba_cache_mode) == (64, "all" if caching else "none")
    del engine
    with pytest.raises(Exception, match="KV cache is needed, which is larger than the available"):
        start(folder, "float32", family="qwen3_5", pages=pages, **sizes | {"num_gpu_blocks_override": needed - 1})


REFUSED = {
    "no whole chunks": ({"block_size": 96, "mamba_block_size": 96}, "block_size = 96 .*schedule.gdn_chunk = 64"),
    "no room for a state": (
        {"dtype": "bfloat16"},
        "block_size = 64 is not supported; supported: at least 128, where .* fill the 129536 bytes of a state",
    ),
    "no size of states": ({"mamba_block_size": None}, "mamba_block_size = 64 .*block_size = 64, said in so many words"),
    "another size of states": ({"mamba_block_size": 128}, "mamba_block_size = 128 .*supported: block_size = 64"),
    "another mode": ({"mamba_cache_mode": "align"}, "mamba_cache_mode = 'align' is not supported; supported: all"),
    "no prefix cache": ({"enable_prefix_caching": False}, "mamba-block-size can only be set with"),
    "one manager for all": ({"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager = True"),
    "another architecture": (
        {"hf_overrides": {"architectures": ["IsoExecForCausalLM"]}},
        "architectures = 'IsoExecForCausalLM' .*IsoExecHybridForCausalLM for this model",
    ),
    "another family": ({"family": "qwen3"}, "qwen3: configuration field"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_engines_refuse_by_name(start, checkpoint, hybrid, case: str) -> None:
    """Whatever vLLM would page otherwise than the kernels need it."""
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    given, said = REFUSED[case]
    changes = {"family": "qwen3_5", "dtype": "float32"} | given
    dtype = changes.pop("dtype")
    pages = HybridPages(page_size=64, prefix_caching=True)
    with pytest.raises(Exception, match=said):
        start(checkpoint(dtype, **hybrid), dtype, pages=pages, **changes)


def test_an_engine_of_attention_alone(start, checkpoint) -> None:
    """It is not asked for under the name of a hybrid."""
    overrides = {"architectures": ["IsoExecHybridForCausalLM"]}
    with pytest.raises(Exception, match="layer_types|IsoExecForCausalLM for this model"):
        start(checkpoint("float32"), "float32", hf_overrides=overrides)


def test_pages_that_vllm_chose(start, checkpoint, hybrid, monkeypatch) -> None:
    """Where vLLM still finds a page too small, and makes it larger, the layers do not take it."""
    from skyrl_isoexec.runtimes.vllm import adapter, checks
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    monkeypatch.setattr(checks, "_page_rules", lambda *_: ())
    assert adapter.check_pages is checks.check_pages
    pages = HybridPages(page_size=64, prefix_caching=True)
    with pytest.raises(
        Exception, match="mamba_block_size was 64 and became 128: .*set block_size to pages.hybrid_page"
    ):
        start(checkpoint("bfloat16", **hybrid), "bfloat16", family="qwen3_5", pages=pages)


AMX = {
    "on": ({}, None),
    "prefix cache turned off": ({"caching": False}, "enable_prefix_caching = False .*on a CPU with AMX tiles"),
    "chunked prefill turned off": ({"chunked": False}, "enable_chunked_prefill = False .*on a CPU with AMX tiles"),
    "neither was asked for": ({"caching": False, "chunked": False, "mode": "none"}, "enable_chunked_prefill = False"),
}


@pytest.mark.parametrize("case", AMX)
@pytest.mark.parametrize("tiles", [True, False])
def test_what_vllm_turns_off(config, namespace, monkeypatch, case: str, tiles: bool) -> None:
    """On a CPU with AMX tiles vLLM gives a hybrid neither a prefix cache nor chunked prefill: that is not computed."""
    from skyrl_isoexec.runtimes.vllm.checks import check_pages

    given, said = AMX[case]
    given = {"caching": True, "chunked": True, "mode": "all"} | given
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    one = namespace(
        cache_config=namespace(
            block_size=64,
            enable_prefix_caching=given["caching"],
            mamba_cache_mode=given["mode"],
            mamba_block_size=64,
            user_specified_mamba_block_size=given["mode"] == "all",
        ),
        scheduler_config=namespace(enable_chunked_prefill=given["chunked"], disable_hybrid_kv_cache_manager=False),
        parallel_config=namespace(tensor_parallel_size=1),
        device_config=namespace(device_type="cpu"),
    )
    if said is None or (not tiles and "chunked" in said):
        check_pages(one, config("float32"), kernels())
    else:
        with pytest.raises(ValueError, match=said if tiles else said.split(" .*")[0]):
            check_pages(one, config("float32"), kernels())


def test_a_contract_decides(contract, hybrid) -> None:
    """Pages of states are for a model that has states, and it gets no engine without."""
    from skyrl_isoexec.contract import encode
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages, settings_from_contract

    pages = HybridPages(page_size=64, prefix_caching=True)
    for changes, wrong in ((hybrid, None), ({}, pages)):
        settings = settings_from_contract(encode(contract("float32", **changes)).decode(), enforce=True)
        with pytest.raises(ValueError, match="hybrid is .*the contract says model.full_attention_interval = "):
            settings.engine_arguments(dtype="float32", hybrid=wrong)
        right = settings.engine_arguments(dtype="float32", hybrid=pages if changes else None)
        assert right["hf_overrides"]["architectures"][0].startswith("IsoExec")
        assert ("mamba_block_size" in right) == bool(changes)


def test_arguments_without_a_prefix_cache() -> None:
    """vLLM takes no size of states then, and has one page of them for a sequence."""
    from skyrl_isoexec.runtimes.vllm.settings import HybridPages

    assert HybridPages(page_size=128, prefix_caching=False).engine_arguments() == {"block_size": 128}


def test_a_step_is_described_by_views(namespace) -> None:
    """A captured graph reads what the runner writes: the very tensors, not copies of them."""
    from skyrl_isoexec.runtimes.vllm.recurrence import Recurrence, StateBackend, StateBuilder

    tables = torch.zeros(8, 4, dtype=torch.int32), torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    common = namespace(block_table_tensor=tables[0][:3], query_start_loc=tables[1][:4], seq_lens=tables[2][:3])
    made = StateBuilder.build(None, 0, common)
    found = (made.block_table, made.query_start, made.seq_lens)
    assert [view.data_ptr() for view in found] == [table.data_ptr() for table in tables]
    assert [len(view) for view in found] == [3, 4, 3]
    assert Recurrence.get_attn_backend(None) is StateBackend and StateBackend.is_ssm()
    assert StateBackend.get_builder_cls().get_cudagraph_support(None, None).name == "UNIFORM_SINGLE_TOKEN_DECODE"


def test_an_image_is_refused() -> None:
    """Positions are those of text: three equal rows, and no jump after them."""
    pytest.importorskip("vllm")
    from skyrl_isoexec.runtimes.vllm.adapter import IsoExecHybridForCausalLM

    rows, jump = IsoExecHybridForCausalLM.get_mrope_input_positions(None, [7, 8, 9], [])
    assert rows.tolist() == [[0, 1, 2]] * 3 and jump == 0
    with pytest.raises(ValueError, match="takes token ids; a request has 1 other inputs"):
        IsoExecHybridForCausalLM.get_mrope_input_positions(None, [7], ["image"])
