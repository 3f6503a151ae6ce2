"""What a run is said to need, against tensors and against hand arithmetic. `pytest
tests/test_plan.py`"""

import dataclasses

import pytest
import torch
from conftest import ARCHS, DRAFTERS, small_drafter
from test_train import CONFIG, STOP, one_batch, setup

from drafter import Drafter
from hf.drafters import ARCHITECTURES
from lab import plan
from loss import make_optimizers, update
from step import Step, arithmetic, draw, step_loss
from support.files import parse_flags
from target import Target
from train import TrainConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("T, every", [(150, None), (192, 64), (1100, 8)])
def test_a_trunk_takes_the_bytes_that_are_planned(arch, dtype, T, every):
    target = Target.toy(arch, 0)
    target.model.to(dtype)
    target.lm_head.to(dtype)
    for name, parameter in target.named_parameters():
        if name.endswith((".A_log", ".dt_bias")):
            parameter.data = parameter.data.float()
    tokens, lengths = torch.zeros(1, T, dtype=torch.long), torch.tensor([T])
    trunk = target.prefill(tokens, lengths, tap_ids=(0, 2), checkpoint_every=every)
    size = torch.finfo(dtype).bits // 8
    assert sum(plan.trunk_bytes(target.config, T, 2, size, every).values()) == trunk.nbytes


@pytest.mark.parametrize("variant", ["dflash", "dspark rnn", "dflash2"])
def test_the_optimizers_remember_what_is_planned(variant):
    target, references = setup()
    drafter = small_drafter(target, **DRAFTERS[variant])
    optimizers = make_optimizers(drafter, CONFIG.matrix_lr, CONFIG.lr)
    part = draw(CONFIG, drafter, *one_batch(target, references), STOP)
    step_loss(CONFIG, drafter, part)[0].backward()
    update(optimizers)
    states = [s for o in optimizers for s in o.state.values()]
    held = sum(t.nbytes for s in states for t in s.values() if t.dim())
    planned = plan.drafter_bytes(drafter, CONFIG, 1)
    assert planned["optimizer"] == held
    assert planned["drafter's weights"] == sum(p.nbytes for p in drafter.parameters())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_what_the_drafters_layers_keep_is_about_what_is_planned(kind, precision, recompute):
    target, T = Target.toy("gqa", 0), 256
    drafter = Drafter.fresh(target, 3, 16, 263, architecture=ARCHITECTURES[kind])
    config = dataclasses.replace(CONFIG, precision=precision, recompute=recompute)
    trunk = target.prefill(torch.randint(256, (2, T)), torch.tensor([T, T]))
    anchors = torch.arange(T)[:: T // config.num_anchors].expand(2, -1)
    Step(config, drafter)  # which makes layers run again, if asked to
    own = {p.untyped_storage().data_ptr() for p in (*drafter.parameters(), *target.parameters())}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), storage  # held, or its place is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), arithmetic(config):
        drafter.block(trunk, anchors)
    found = sum(size for size, _ in kept.values())
    planned = plan.graph_bytes(drafter, config, 2, T)
    layer = planned["~ drafter: a layer's gradients"]
    context, blocks = planned["~ drafter: context"], planned["~ drafter: blocks"]
    if recompute:  # what one layer keeps is there while it is run again
        assert 0.5 * (context + blocks - layer) < found < context + blocks - layer
        return
    weights = plan.drafter_bytes(drafter, config, 1).get("drafter's weights in bfloat16", 0)
    assert 0.95 < (context + blocks + weights) / found < 1.2


def test_the_real_sizes_by_hand():
    config = TrainConfig(mode="specopd", target="8B", draft_layers=5, num_anchors=64)
    target, drafter = plan.on_meta(config)
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert plan.numbers(target) == 2 * 151936 * 4096 + 36 * layer + 4096
    assert plan.numbers(drafter) == 4096 * 5 * 4096 + 2 * 4096 + 5 * layer
    held = plan.trunk_bytes(target.config, 2048, 5, 2)
    assert held["keys and values"] == 2048 * 36 * 2 * 8 * 128 * 2
    assert held["hidden and taps"] == 2048 * (6 * 4096 * 2 + 8) and not held["recurrent states"]
    whole = plan.needs(target, drafter, config, 1, 4, False)
    assert whole["target's weights"] == 2 * plan.numbers(target)
    assert whole["trunks: keys and values"] == 4 * 256 * 36 * 2 * 8 * 128 * 2
    few = dataclasses.replace(config, num_references=10)  # whose trunks are all kept
    trunk = sum(plan.trunk_bytes(target.config, 256, 5, 2).values())
    assert plan.needs(target, drafter, few, 1, 4, False)["trunks of all references"] == 10 * trunk

    target, drafter = plan.on_meta(dataclasses.replace(config, target="27B"))
    linear = 5120 * (2 * 2048 + 2 * 6144 + 2 * 48) + 10240 * 4 + 2 * 48 + 128 + 6144 * 5120
    full = 5120 * 256 * (2 * 24 + 2 * 4 + 24) + 2 * 256
    rest = 3 * 5120 * 17408 + 2 * 5120
    assert plan.numbers(target) == 2 * 248320 * 5120 + 48 * linear + 16 * full + 64 * rest + 5120
    held = plan.trunk_bytes(target.config, 2048, 5, 2)
    # 32 states, 64 tokens apart, and the last, of 48 x 128 x 128 in float32, in 48 layers; and
    # where they stand
    assert held["recurrent states"] == 48 * 33 * (4 * 48 * 128 * 128 + 8)
    token = 2 * (2 * 2048 + 6144) + 4 * (2048 + 6144 + 48)
    assert held["linear layers' tokens"] == 2048 * 48 * token
    assert held["keys and values"] == 2048 * 16 * 2 * 2 * 4 * 256
    assert plan.chosen(target, drafter, dataclasses.replace(config, gpu_gib=60), 1) is None
    sequences, sharded, found = plan.chosen(target, drafter, config, 8)
    assert sharded and sequences >= 1 and sum(found.values()) < 0.9 * 80 * 2**30
    layers = 48 * linear + 16 * full + 64 * rest
    assert found["target's weights, a share"] == 2 * (2 * 248320 * 5120 + 5120 + -(-layers // 8))

    target, drafter = plan.on_meta(dataclasses.replace(config, target="125B"))
    assert plan.numbers(target, table=True) == pytest.approx(128 * 2_500_012 * 160, rel=1e-3)
    experts = 48 * 512 * 3 * 2560 * 640
    assert experts < plan.numbers(target) < 1.05 * experts
    assert plan.chosen(target, drafter, config, 1) is None
    assert plan.chosen(target, drafter, config, 8)[1]


def test_a_batch_that_does_not_fit_is_planned_in_parts(capsys):
    config = TrainConfig(
        mode="specopd",
        target="8B",
        draft_layers=5,
        num_anchors=64,
        plan=True,
        response_length=1536,
        batch_size=64,
        precision="bfloat16",
    )
    figures = plan.plan(config)
    said, B = capsys.readouterr().out, figures["1"]["sequences"]
    assert B < 64 and f"--batch-size 64 --grad-accum {64 // B} --precision bfloat16" in said
    waiting = (64 - B) * 2 * 4096 * (5 * (64 + 1536) + 64 * 2 * 8)
    assert figures["1"]["bytes"]["blocks of the other parts"] == waiting
    assert "blocks of the other parts" not in figures["8"]["bytes"]  # 8 each, at once
    blocks = figures["1"]["bytes"]["~ drafter: blocks"]
    again = plan.plan(dataclasses.replace(config, recompute=True))["1"]
    assert again["sequences"] >= B and "--recompute" in capsys.readouterr().out
    assert again["bytes"]["~ drafter: blocks"] / again["sequences"] < 0.6 * blocks / B


def test_a_drafters_folder_is_planned_with_or_without_its_weights(tmp_path):
    target = Target.toy("gqa", 0)
    target.save_pretrained(tmp_path / "target")
    Drafter.fresh(target, 3, 16, 263).save_pretrained(tmp_path / "drafter")
    for _ in range(2):
        given = dict(target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))
        found = plan.plan(TrainConfig(mode="e2e", **given, plan=True))["1"]
        assert found["fits"] and "~ p's hidden states" in found["bytes"]
        (tmp_path / "drafter/model.safetensors").unlink(missing_ok=True)
    ce = plan.plan(TrainConfig(mode="ce", **given, plan=True))["1"]["bytes"]
    one, other = (x["~ p's hidden states"] for x in (found["bytes"], ce))
    assert one == found["sequences"] * 16 * 15 * 128 * 2 and other == 0


def test_a_machine_without_a_gpu_plans_for_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["--mode", "specopd", "--target", "8B", "--device", "cuda"]
    assert parse_flags(TrainConfig, "", [*asked, "--plan"]).device == "cuda"
    with pytest.raises(ValueError, match="no CUDA"):
        parse_flags(TrainConfig, "", asked)


def test_a_target_that_fits_is_left_whole(capsys):
    figures = plan.plan(TrainConfig(mode="specopd", target="8B", plan=True))
    assert figures["8"]["fits"] and not figures["8"]["sharded"] and not figures["1"]["sharded"]
    assert figures["8"]["bytes"]["drafter's gradients"] == 8 * figures["drafter_numbers"]
    said = capsys.readouterr().out
    assert "torchrun --nproc_per_node=8 train.py" in said and "8.19 G numbers" in said
    assert "--cache-gib 0" in said
    with pytest.raises(FileNotFoundError, match="nowhere"):
        plan.plan(TrainConfig(mode="specopd", target="8B", drafter="nowhere", plan=True))
    with pytest.raises(ValueError, match="nobody knows before"):
        plan.plan(TrainConfig(mode="rollout", target="8B", plan=True))
    with pytest.raises(ValueError, match="8B, 27B, 125B"):
        plan.plan(TrainConfig(mode="specopd", target="9B", plan=True))
