"""The memory that a run is said to need, against tensors and hand arithmetic. `pytest
tests/lab/test_plan.py`"""

import dataclasses
import importlib
import re
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch

import train as training
from drafter import Drafter
from hf.drafters import ARCHITECTURES
from lab import plan
from serve import ServeConfig
from small import ARCHS, DRAFTERS, ROOT, small_drafter
from small_runs import CONFIG, STOP, target_and_references
from support.flags import parse_flags
from support.optim import make_optimizers, optimizer_step
from support.prepare import Trunks
from target import Target
from train import Step, TrainConfig, gradient, next_batch


def plan_config(**changes) -> plan.Config:
    values = dict(mode="specopd", target="8B", draft_layers=5, num_anchors=64)
    return plan.Config(**values | changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("T, spacing", [(150, None), (192, 64), (1100, 8)])
def test_a_trunk_takes_the_bytes_that_are_planned(arch, dtype, T, spacing):
    target = Target.toy(arch, 0)
    target.model.to(dtype)
    target.lm_head.to(dtype)
    for name, parameter in target.named_parameters():
        if name.endswith((".A_log", ".dt_bias")):
            parameter.data = parameter.data.float()
    tokens, lengths = torch.zeros(1, T, dtype=torch.long), torch.tensor([T])
    trunk = target.prefill(tokens, lengths, tap_ids=(0, 2), checkpoint_every=spacing)
    planned = plan.trunk_bytes(target.config, T, 2, dtype.itemsize, spacing)
    assert sum(planned.values()) == trunk.nbytes


@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_the_optimizers_remember_what_is_planned(variant):
    target, references = target_and_references()
    drafter = small_drafter(target, **DRAFTERS[variant])
    optimizers = make_optimizers(drafter, CONFIG.matrix_lr, CONFIG.lr)
    trunks = Trunks(target, references, drafter.config.target_layer_ids, CONFIG.cache_gib)
    parts = next_batch(CONFIG, drafter, trunks, 0, STOP)
    gradient(CONFIG, Step(CONFIG, drafter), drafter, parts)
    optimizer_step(optimizers)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    remembered = sum(t.nbytes for state in states for t in state.values() if t.dim())
    planned = plan.drafter_bytes(drafter, CONFIG, 1)
    assert planned["optimizer"] == remembered
    assert planned["drafter's weights"] == sum(p.nbytes for p in drafter.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_what_the_drafters_layers_keep_is_about_what_is_planned(kind, precision, recompute):
    target, T = Target.toy("gqa", 0), 256
    drafter = Drafter.fresh(target, 3, 16, 263, architecture=ARCHITECTURES[kind])
    drafter.recompute = recompute
    config = dataclasses.replace(CONFIG, precision=precision, recompute=recompute)
    tap_ids = drafter.config.target_layer_ids
    tokens, lengths = torch.randint(256, (2, T)), torch.tensor([T, T])
    trunk = target.prefill(tokens, lengths, tap_ids=tap_ids)
    anchors = torch.arange(T)[:: T // config.num_anchors].expand(2, -1)
    weights = (*drafter.parameters(), *target.parameters())
    weights = {p.untyped_storage().data_ptr() for p in weights}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # the storage is held, or its address would be used again
            saved[storage.data_ptr()] = storage.nbytes(), storage
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), autocast:
        drafter.block(trunk, anchors)
    measured = sum(size for size, _ in saved.values())
    planned = plan.graph_bytes(drafter, config, 2, T)
    layer = planned["~ drafter: a layer's gradients"]
    context, blocks = planned["~ drafter: context"], planned["~ drafter: blocks"]
    if recompute:  # what one layer keeps is there while it is run again
        assert 0.5 * (context + blocks - layer) < measured < context + blocks - layer
        return
    half = plan.drafter_bytes(drafter, config, 1).get("drafter's weights in bfloat16", 0)
    assert 0.95 < (context + blocks + half) / measured < 1.2


def test_the_8b_by_hand():
    config = plan_config()
    target, drafter = plan.build_on_meta(config)
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert plan.num_parameters(target) == 2 * 151936 * 4096 + 36 * layer + 4096
    assert plan.num_parameters(drafter) == 4096 * 5 * 4096 + 2 * 4096 + 5 * layer
    trunk = plan.trunk_bytes(target.config, 2048, 5, 2)
    assert trunk["keys and values"] == 2048 * 36 * 2 * 8 * 128 * 2
    assert trunk["hidden and taps"] == 2048 * (6 * 4096 * 2 + 8) and not trunk["recurrent states"]
    whole = plan.bytes_needed(target, drafter, config, 1, 4, False)
    assert whole["target's weights"] == 2 * plan.num_parameters(target)
    assert whole["trunks: keys and values"] == 4 * 256 * 36 * 2 * 8 * 128 * 2
    few = dataclasses.replace(config, num_references=10)  # whose trunks are all kept
    trunk = sum(plan.trunk_bytes(target.config, 256, 5, 2).values())
    sizes = plan.bytes_needed(target, drafter, few, 1, 4, False)
    assert sizes["trunks of all references"] == 10 * trunk


def test_the_27b_by_hand():
    config = plan_config(target="27B")
    target, drafter = plan.build_on_meta(config)
    linear = 5120 * (2 * 2048 + 2 * 6144 + 2 * 48) + 10240 * 4 + 2 * 48 + 128 + 6144 * 5120
    full = 5120 * 256 * (2 * 24 + 2 * 4 + 24) + 2 * 256
    rest = 3 * 5120 * 17408 + 2 * 5120
    layers = 48 * linear + 16 * full + 64 * rest
    outside = 2 * 248320 * 5120 + 5120
    assert plan.num_parameters(target) == outside + layers
    trunk = plan.trunk_bytes(target.config, 2048, 5, 2)
    # 32 states, 64 tokens apart, and the last one, of 48 x 128 x 128 in float32, in 48 layers; and
    # where they stand
    assert trunk["recurrent states"] == 48 * 33 * (4 * 48 * 128 * 128 + 8)
    token = 2 * (2 * 2048 + 6144) + 4 * (2048 + 6144 + 48)
    assert trunk["linear layers' tokens"] == 2048 * 48 * token
    assert trunk["keys and values"] == 2048 * 16 * 2 * 2 * 4 * 256
    small_gpu = dataclasses.replace(config, gpu_gib=60)
    assert not plan.largest_fit(target, drafter, small_gpu, 1)["fits"]
    fit = plan.largest_fit(target, drafter, config, 8)
    sizes = fit["bytes"]
    assert fit["sharded"] and fit["sequences"] >= 1 and sum(sizes.values()) < 0.9 * 80 * 2**30
    assert sizes["target's weights, a share"] == 2 * (outside + -(-layers // 8))


def test_the_125b_by_hand():
    config = plan_config(target="125B")
    target, drafter = plan.build_on_meta(config)
    table = sum(p.numel() for p in target.parameters()) - plan.num_parameters(target)
    assert table == pytest.approx(128 * 2_500_012 * 160, rel=1e-3)
    experts = 48 * 512 * 3 * 2560 * 640
    assert experts < plan.num_parameters(target) < 1.05 * experts
    assert not plan.largest_fit(target, drafter, config, 1)["fits"]
    assert plan.largest_fit(target, drafter, config, 8)["sharded"]


def test_a_batch_that_does_not_fit_is_planned_in_parts(capsys):
    config = plan_config(response_length=1536, batch_size=64, precision="bfloat16")
    figures = plan.run(config)
    said, B = capsys.readouterr().out, figures["1"]["sequences"]
    assert B < 64 and f"--precision bfloat16 --grad-accum {64 // B} --cache-gib 0" in said
    waiting = (64 - B) * 2 * 4096 * (5 * (64 + 1536) + 64 * (2 * 8 + 7))
    assert figures["1"]["bytes"]["blocks of the other parts"] == waiting
    assert "blocks of the other parts" not in figures["8"]["bytes"]  # 8 each, at once
    blocks = figures["1"]["bytes"]["~ drafter: blocks"]
    again = plan.run(dataclasses.replace(config, recompute=True))["1"]
    assert again["sequences"] >= B and "--recompute" in capsys.readouterr().out
    assert again["bytes"]["~ drafter: blocks"] / again["sequences"] < 0.6 * blocks / B


def test_a_drafters_folder_is_planned_with_or_without_its_weights(tmp_path):
    target = Target.toy("gqa", 0)
    target.save_pretrained(tmp_path / "target")
    Drafter.fresh(target, 3, 16, 263).save_pretrained(tmp_path / "drafter")
    pair = dict(target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))
    for _ in range(2):
        e2e = plan.run(plan.Config(mode="e2e", **pair))["1"]
        assert e2e["fits"] and "~ p's hidden states" in e2e["bytes"]
        (tmp_path / "drafter/model.safetensors").unlink(missing_ok=True)
    ce = plan.run(plan.Config(mode="ce", **pair))["1"]["bytes"]
    rows = e2e["sequences"] * 64 * 15
    assert e2e["bytes"]["~ p's hidden states"] == rows * 128 * 2
    assert ce["~ p's hidden states"] == 0


def test_a_machine_without_a_gpu_plans_for_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["--mode", "specopd", "--target", "8B", "--device", "cuda"]
    assert parse_flags(plan.Config, "", flags).device == "cuda"
    with pytest.raises(ValueError, match="no CUDA"):
        parse_flags(TrainConfig, "", flags)


def test_a_target_that_fits_is_left_whole(capsys):
    figures = plan.run(plan.Config(mode="specopd", target="8B"))
    assert figures["8"]["fits"] and not figures["8"]["sharded"] and not figures["1"]["sharded"]
    assert figures["8"]["bytes"]["drafter's gradients"] == 8 * figures["drafter_parameters"]
    said = capsys.readouterr().out
    assert "torchrun --nproc_per_node=8 train.py" in said and "8.19 G parameters" in said
    assert "--cache-gib 0" in said


@pytest.mark.parametrize(
    "changes, error, word",
    [
        (dict(drafter="nowhere"), FileNotFoundError, "nowhere"),
        (dict(mode="rollout"), ValueError, "nobody knows before"),
        (dict(target="9B"), ValueError, "8B, 27B, 125B"),
    ],
)
def test_what_cannot_be_planned_is_named(changes, error, word):
    with pytest.raises(error, match=word):
        plan.run(plan_config(**changes))


# ------------------------------------------------------------------- the commands of the documents


def documents() -> dict[str, list]:
    """{file: blocks of code}, each a list of commands, and those as words."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = {}
    for file in files:
        texts = re.findall(r"^```\n(.*?)^```", file.read_text(), re.M | re.S)
        lines = [text.replace("\\\n", " ").splitlines() for text in texts]
        blocks[file.name] = [[words(line) for line in block] for block in lines]
    return blocks


def words(line: str) -> list[str]:
    """A command's words, without what starts several processes and without a remark."""
    command = re.sub(r"\s{2,}\(.*\)$", "", line.split("&&")[-1])
    found = shlex.split(command) if command.count("'") % 2 == 0 else []
    if found[:1] == ["torchrun"]:
        found = ["python", *[word for word in found[1:] if "--nproc" not in word]]
    return found


def config_of_command(command: list[str], monkeypatch):
    """What a command's own flags make of it; None for a command that is not ours."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if command[:2] == ["python", "train.py"]:
        presets = getattr(training, "PRESETS", {"smoke": training.SMOKE})
        return parse_flags(TrainConfig, "", command[2:], presets=presets)
    if command[:2] == ["python", "serve.py"] and command[2:]:
        return parse_flags(ServeConfig, "", command[2:])
    if command[:3] == ["python", "-m", "lab"] and command[3:]:
        config_class = importlib.import_module(f"lab.{command[3]}").Config
        return parse_flags(config_class, "", command[4:])
    return None


@pytest.mark.parametrize("file", documents())
def test_every_command_of_a_document_has_flags_that_its_program_knows(file, monkeypatch):
    commands = [command for block in documents()[file] for command in block]
    configs = [config_of_command(command, monkeypatch) for command in commands]
    ours = [c for c in commands if c[:2] == ["python", "train.py"] or c[1:3] == ["-m", "lab"]]
    assert sum(config is not None for config in configs) >= len(ours)


def test_a_flag_that_no_program_knows_is_noticed(monkeypatch):
    with pytest.raises(SystemExit):
        config_of_command(["python", "train.py", "--num-anchor", "8"], monkeypatch)


@pytest.mark.parametrize("file", ["README.md", "scale.md"])
def test_a_command_below_a_plan_is_one_that_the_plan_printed(file, monkeypatch, capsys):
    checked = 0
    for block in documents()[file]:
        if not any(command[:4] == ["python", "-m", "lab", "plan"] for command in block):
            continue
        printed = []
        for command in block:
            config = config_of_command(command, monkeypatch)
            if isinstance(config, plan.Config):
                figures = plan.run(config)
                printed += [words(figures[n]["command"]) for n in ("1", "8")]
            elif isinstance(config, TrainConfig):
                assert config in [config_of_command(c, monkeypatch) for c in printed], command
                checked += 1
    assert checked


def test_a_printed_command_has_every_flag_that_differs_from_the_defaults(monkeypatch):
    flags = dict(
        seed=3, num_greedy=0, merge=False, branch_temperature=0.5, corpus="my prompts.jsonl"
    )
    config = plan_config(**flags, batch_size=8, num_references=64)
    command = plan.run(config)["1"]["command"]
    run = config_of_command(words(command), monkeypatch)
    assert {name: getattr(run, name) for name in flags} == flags
    assert run.target == "FOLDER" and run.num_anchors == 64 and run.device == "cuda"


def test_of_a_hubs_name_the_config_alone_is_fetched(tmp_path, monkeypatch):
    Target.toy("gqa", 0).save_pretrained(tmp_path)
    fetched = []

    def hf_hub_download(name, file):
        fetched.append((name, file))
        return str(tmp_path / file)

    hub = SimpleNamespace(hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    figures = plan.run(plan.Config(mode="specopd", target="owner/name"))
    assert fetched == [("owner/name", "config.json")]
    assert "--target owner/name" in figures["1"]["command"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not installed
    with pytest.raises(FileNotFoundError, match="hf download owner/name config.json"):
        plan.run(plan.Config(mode="specopd", target="owner/name"))
