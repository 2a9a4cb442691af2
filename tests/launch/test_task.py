"""The embedded task: its problems, its tokenizer, its reward, and a base checkpoint that is trained once."""

import dataclasses
import json
import multiprocessing
from pathlib import Path

import pytest
import skyrl_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_isoexec.launch.compose import compose
from skyrl_isoexec.launch.config import LaunchConfig
from skyrl_isoexec.launch.preflight.model import checkpoint, planned
from skyrl_isoexec.launch.task import arithmetic, base_folder, prepare_checkpoint, prepare_data
from skyrl_isoexec.launch.task.env import ENV_ID, register
from skyrl_isoexec.launch.task.files import ensure_base
from skyrl_isoexec.launch.task.problems import Problem, is_held_out, problems, row, split
from skyrl_isoexec.launch.task.tokenizer import EOS, IDS, SYMBOLS, build_tokenizer, encode, save_tokenizer

QUICK = ["task.base.steps=2", "task.base.batch_size=4", "model.shape={hidden_size: 32, intermediate_size: 32}"]


def composed(tmp_path: Path, *arguments: str) -> LaunchConfig:
    """A configuration whose cache and run folder are temporary."""
    folders = [f"task.cache_dir={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    return compose(["+exec=isoexec", *folders, *arguments])[0]


def test_every_problem_is_in_exactly_one_part() -> None:
    train, held_out = split(2, 8)
    assert len(set(train)) + len(set(held_out)) == len(set(train) | set(held_out)) == 10_000
    assert 0.1 < len(held_out) / 10_000 < 0.15
    assert Problem(prompt="99+99=", answer="198") in {*train, *held_out}
    assert all(is_held_out(problem, 8) for problem in held_out)


def test_every_problem_fits_its_limits() -> None:
    _, skyrl = compose(["+exec=isoexec"])
    longest = max(problems(2), key=lambda p: len(p.prompt) + len(p.answer))
    assert len(encode(longest.prompt)) <= skyrl.trainer.max_prompt_length
    assert len(encode(longest.answer)) + 1 <= skyrl.generator.sampling_params.max_generate_length


def test_tokenizer_has_sixteen_symbols_and_survives_the_disk(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(loaded) == loaded.vocab_size == len(SYMBOLS) == 16
    assert loaded.convert_ids_to_tokens(list(range(16))) == list(SYMBOLS)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (0, 1, 2)


def test_chat_template_renders_the_bare_problem() -> None:
    tokenizer = build_tokenizer()
    message = [{"role": "user", "content": "12+34="}]
    for add_generation_prompt in (True, False):
        ids = tokenizer.apply_chat_template(
            message, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        assert ids == encode("12+34=")


def test_every_answer_survives_decoding_and_encoding() -> None:
    tokenizer = build_tokenizer()
    for answer in {problem.answer for problem in problems(2)}:
        assert tokenizer.decode([*encode(answer), IDS[EOS]], skip_special_tokens=True) == answer
        assert tokenizer.encode(answer, add_special_tokens=False) == encode(answer)


RIGHT, WRONG = ("46", f"46{EOS}"), ("046", "46 ", "", "4", EOS, f"46{EOS}{EOS}", "4<pad>6")


@pytest.mark.parametrize(("action", "reward"), [*((a, 1.0) for a in RIGHT), *((a, 0.0) for a in WRONG)])
def test_reward_is_an_exact_match(action: str, reward: float) -> None:
    register()
    register()
    env = skyrl_gym.make(ENV_ID, env_config={}, extras=row(Problem(prompt="12+34=", answer="46")))
    prompt, _ = env.init([{"role": "user", "content": "12+34="}])
    assert prompt == [{"role": "user", "content": "12+34="}]
    step = env.step(action)
    assert (step["reward"], step["done"], step["observations"]) == (reward, True, [])


def test_a_row_without_an_answer_is_refused() -> None:
    register()
    with pytest.raises(KeyError, match="reward_spec"):
        skyrl_gym.make(ENV_ID, env_config={}, extras={})


def test_skyrl_reads_the_data(tmp_path: Path) -> None:
    from skyrl.train.dataset import PromptDataset

    arguments = ["+exec=isoexec", f"run_dir={tmp_path}", "task.digits=1", "model.path=somewhere"]
    launch, skyrl = compose(arguments)
    assert prepare_checkpoint(launch) == Path("somewhere")
    prepare_data(launch, skyrl)
    limit = skyrl.trainer.max_prompt_length
    sizes = []
    for file in (*skyrl.data.train_data, *skyrl.data.val_data):
        data = PromptDataset(file, build_tokenizer(), max_prompt_length=limit, num_workers=1)
        messages, env_class, extras, _ = data[0]
        assert env_class == skyrl.environment.env_class == ENV_ID
        a, b = messages[0]["content"].rstrip("=").split("+")
        assert extras["reward_spec"]["ground_truth"] == str(int(a) + int(b))
        sizes.append(len(data))
    assert sum(sizes) == 100 and min(sizes) > 0


def test_data_that_the_user_names_is_not_written(tmp_path: Path) -> None:
    named = tmp_path / "mine.jsonl"
    folder = f"run_dir={tmp_path / 'run'}"
    launch, skyrl = compose(["+exec=isoexec", folder, f"data.train_data=[{named}]", "model.path=x"])
    prepare_data(launch, skyrl)
    assert skyrl.data.val_data == [] and not named.exists() and not (tmp_path / "run").exists()


def test_base_checkpoint_is_a_plain_hugging_face_one(tmp_path: Path) -> None:
    launch = composed(tmp_path, *QUICK)
    said: list[str] = []
    folder = ensure_base(launch, said.append)
    assert folder == base_folder(launch) and any("step 2/2" in line for line in said)
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    assert (model.config.model_type, model.config.vocab_size, model.dtype) == ("qwen3", 16, torch.float32)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert len(AutoTokenizer.from_pretrained(str(folder))) == 16
    assert json.loads((folder / "base.json").read_text())["sampled"] >= 0.0
    assert oct(folder.stat().st_mode & 0o777) == "0o755"
    assert checkpoint(folder, dtype="float32") == planned(launch), "checks before the training see what comes out of it"


def test_base_checkpoint_is_trained_once_and_the_same_every_time(tmp_path: Path) -> None:
    launch = composed(tmp_path, *QUICK)
    first = (ensure_base(launch, lambda _: None) / "model.safetensors").read_bytes()
    again: list[str] = []
    ensure_base(launch, again.append)
    assert again == []
    torch.manual_seed(1234)
    moved = dataclasses.replace(launch, task=dataclasses.replace(launch.task, cache_dir=str(tmp_path / "other")))
    assert (ensure_base(moved, lambda _: None) / "model.safetensors").read_bytes() == first


def test_digest_follows_what_decides_the_weights(tmp_path: Path) -> None:
    names = {
        base_folder(composed(tmp_path, *arguments)).name
        for arguments in ((), ("task.base.seed=1",), ("model.shape.num_layers=1",), ("task.held_out_one_in=4",))
    }
    assert len(names) == 4
    same = ("run.name=other", "topology=trainer_tp2", "model.dtype=bfloat16", "trainer.seed=1")
    assert base_folder(composed(tmp_path, *same)).name == base_folder(composed(tmp_path)).name


def _train(launch: LaunchConfig, results: "multiprocessing.SimpleQueue[tuple[str, list[str]]]") -> None:
    said: list[str] = []
    results.put((str(ensure_base(launch, said.append)), said))


def test_two_launches_at_once_train_one_checkpoint(tmp_path: Path) -> None:
    launch = composed(tmp_path, *QUICK, "task.base.steps=40")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_train, args=(launch, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    folder = base_folder(launch)
    assert {name for name, _ in answers} == {str(folder)}
    assert sum(any("training it once" in line for line in said) for _, said in answers) == 1
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_a_failed_training_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_isoexec.launch.task import base

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(base, "save", fail)
    launch = composed(tmp_path, *QUICK)
    with pytest.raises(RuntimeError, match="out of luck"):
        ensure_base(launch, lambda _: None)
    assert [p.suffix for p in base_folder(launch).parent.iterdir()] == [".lock"]


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    launch = composed(tmp_path, *QUICK)
    folder = ensure_base(launch, lambda _: None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model.safetensors: delete the folder"):
        ensure_base(launch)


@pytest.mark.slow
def test_default_base_checkpoint_is_worth_training_further(tmp_path: Path) -> None:
    """Right often enough that groups of samples differ, wrong often enough that there is something to learn."""
    folder = ensure_base(composed(tmp_path), print)
    assert 0.2 < json.loads((folder / "base.json").read_text())["sampled"] < 0.45


@pytest.mark.parametrize(
    ("action", "reward"),
    [("7", 1.0), ("The answer is 7.<|im_end|>", 1.0), ("3 + 4 = 7", 0.0), ("17", 0.0), ("-7", 0.0), ("seven", 0.0)],
)
def test_the_first_number_of_an_answer_in_words_counts(action: str, reward: float) -> None:
    arithmetic.register()
    sum_ = arithmetic.row(Problem(prompt="3+4=", answer="7"))
    assert sum_["prompt"] == [{"role": "user", "content": "What is 3 + 4? Answer with the number only."}]
    env = skyrl_gym.make(arithmetic.ENV_ID, env_config={}, extras=sum_)
    assert env.step(action)["reward"] == reward


def test_sums_in_words_are_written_with_the_split_of_the_bare_ones(tmp_path: Path) -> None:
    launch, skyrl = compose(["+exec=isoexec", "task=arithmetic", "task.digits=1", f"run_dir={tmp_path / 'run'}"])
    prepare_data(launch, skyrl)
    train, held_out = split(1, launch.task.held_out_one_in)
    rows = [json.loads(line) for line in (tmp_path / "run/data/train.jsonl").read_text().splitlines()]
    assert rows == [arithmetic.row(problem, wording) for wording in arithmetic.WORDINGS for problem in train]
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) == len(train) * len(arithmetic.WORDINGS)
    assert len((tmp_path / "run/data/held_out.jsonl").read_text().splitlines()) == len(held_out)
