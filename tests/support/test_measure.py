"""What is counted in a decoding, and how figures of it are compared."""

import json

import pytest
import torch

from drafter import Sampling
from hf import load_tokenizer
from serve import generate
from small import free_port, random_prompts, small_drafter, small_target
from small_runs import join_processes
from support import distributed
from support.measure import (
    LOOP,
    Acceptance,
    Measure,
    TaskMean,
    by_task,
    count_fresh,
    decoding_speed,
    evaluate,
    format_gain,
    gain,
    is_fresh,
    loop_start,
    read_tasks,
    repetition,
)
from support.toy import write_byte_tokenizer

W = 4


def test_evaluation_counts_what_decoding_did(target, drafter):
    prompts = random_prompts(7)
    results = generate(target, drafter, prompts, 30, Sampling(1.0), seed=2)
    measured = evaluate(target, drafter, prompts, 30, Sampling(1.0), seed=2, batch_size=3)
    num_rounds = sum(r.num_rounds for r in results)
    assert measured.mean == sum(r.num_committed for r in results) / num_rounds
    rounds = [n for r in results for n in r.accepted]
    for k in range(1, W + 1):
        assert abs(measured.survival[k - 1] - sum(n >= k for n in rounds) / len(rounds)) < 1e-6
    assert abs(1 + sum(measured.survival) - measured.mean) < 1e-5  # no stop token cut a round
    assert measured.texts == [r.tokens for r in results]


def test_conditional_rates_multiply_to_survival_and_loops_are_counted():
    survived = torch.tensor([[8, 4, 1, 0], [4, 2, 1, 0]])
    common = Acceptance(*torch.tensor([[9, 9], [10, 6], [50, 30]]), torch.zeros(2), survived, 1.0)
    assert common.survival == pytest.approx([12 / 16, 6 / 16, 2 / 16, 0])
    assert common.conditional == pytest.approx([12 / 16, 1 / 2, 1 / 3, 0])
    counts = torch.tensor([[5, 6, 0], [3, 3, 0], [9, 9, 0]])
    survived = torch.tensor([[2, 0, 0], [2, 0, 0], [0, 0, 0]])
    rare = Acceptance(*counts, torch.zeros(3), survived, 1.0)
    assert rare.conditional == [pytest.approx(4 / 6), 0.0, None] and rare.mean == 11 / 6
    assert 1.6 < rare.interval()[0] <= rare.mean <= rare.interval()[1] < 2.1
    assert repetition([1, 2, 3, 4] * 8, 4) == pytest.approx(1 - 4 / 29)
    assert repetition(list(range(30))) == 0 and repetition([1, 2]) == 0


def acceptance(committed, rounds) -> Acceptance:
    return Acceptance(committed, rounds, rounds, committed * 0.0, torch.zeros(96, W), 1.0)


def test_the_paired_interval_is_narrower_and_covers_the_difference():
    torch.manual_seed(0)
    rounds = torch.randint(20, 40, (96,))
    committed = (rounds * (2 + torch.rand(96))).long()
    a = acceptance(committed, rounds)
    b = acceptance(committed + rounds // 5, rounds)
    low, high = b.interval(a)
    assert low <= b.mean - a.mean <= high and low > 0.1
    wide = b.interval()
    assert high - low < (wide[1] - wide[0]) / 3
    figures = gain(b, a)
    assert figures["interval"] == (low, high)
    assert figures["percent"] == pytest.approx(100 * (b.mean - a.mean) / a.mean)
    assert format_gain(figures) == f"{figures['percent']:+5.1f} % [{low:+.2f}, {high:+.2f}]"


def test_the_mean_of_tasks_weighs_each_task_alike():
    rounds = torch.full((96,), 30)
    torch.manual_seed(0)
    easy = acceptance((rounds * (3 + torch.rand(96))).long(), rounds)
    hard = acceptance((rounds * (1 + torch.rand(96))).long(), rounds * 1)
    both = TaskMean({"easy": easy, "hard": hard})
    assert both.mean == (easy.mean + hard.mean) / 2
    low, high = both.interval()
    assert low < both.mean < high and both.interval(both) == (0, 0)
    assert gain(both, TaskMean({"a": hard, "b": hard}))["interval"][0] > 0


def test_a_measure_takes_a_share_of_its_prompts_but_at_least_eight(target, drafter):
    measure = Measure(random_prompts(20), 6, (), 0)
    assert len(measure(target, drafter, 0.0).rounds) == 20
    assert len(measure(target, drafter, 1.0, 0.5).rounds) == 10
    assert len(measure(target, drafter, 1.0, 0.1).rounds) == 8


def test_speeds_are_of_the_same_text(target, drafter):
    speeds = decoding_speed(target, drafter, Measure(random_prompts(3), 6, (), 0), 2)
    assert set(speeds) == {"plain", "speculative", "same_text", "partings"}
    assert speeds["same_text"] and not speeds["partings"] and speeds["plain"] > 0


# ------------------------------------------------------------------------------- several processes


def as_one(measured: Acceptance) -> list:
    """All that is counted, and the texts."""
    names = ("committed", "rounds", "nodes", "repeated", "survived")
    return [*(getattr(measured, name).tolist() for name in names), measured.texts]


@pytest.mark.parametrize("num_prompts", [7, 1])  # of one, the second process decodes nothing
def test_two_processes_count_what_one_does(target, drafter, monkeypatch, num_prompts):
    how = (target, drafter, random_prompts(num_prompts), 20, Sampling(1.0), 2, (3,))
    alone = evaluate(*how)
    shares = []
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda x: shares.append(x) or x)
    for number in (0, 1):
        monkeypatch.setattr(distributed, "own_rows", lambda rows, n=number: rows[n::2])
        evaluate(*how, batch_size=2)
    assert shares[0].any() and (num_prompts == 1) == (not shares[1].any())
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda _: sum(shares))
    assert as_one(evaluate(*how)) == as_one(alone)


def measure_worker(number: int, size: int, port: int, folder: str) -> None:
    """Of a target whose layers are spread, and of a whole one."""
    join_processes(number, size, port)
    whole = small_target()
    drafter = small_drafter(whole)
    measure = Measure(random_prompts(9), 12, (3,), 0)
    alone = torch.load(f"{folder}/alone.pt")
    for target in (whole, distributed.load_sharded_target(f"{folder}/target")):
        target.num_tokens = whole.num_tokens
        for temperature in (0.0, 1.0):
            measured = as_one(measure(target, drafter, temperature))
            assert measured == alone[temperature]
            distributed.barrier()
    distributed.stop()


@pytest.mark.slow
def test_two_real_processes_measure_what_one_does_on_a_spread_target_too(tmp_path):
    target = small_target()
    target.save_pretrained(tmp_path / "target", eos_token_id=21, pad_token_id=0)
    measure = Measure(random_prompts(9), 12, (3,), 0)
    alone = {t: as_one(measure(target, small_drafter(target), t)) for t in (0.0, 1.0)}
    torch.save(alone, tmp_path / "alone.pt")
    torch.multiprocessing.spawn(measure_worker, (2, free_port(), str(tmp_path)), nprocs=2)


# ------------------------------------------------------------------------------------------- tasks


def test_a_task_is_a_file_and_one_whose_prompts_are_too_long_is_left_out(
    tmp_path, target, drafter, capsys
):
    write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "short.jsonl", tmp_path / "long.jsonl", tmp_path / "other/short.jsonl"]
    for path, text in zip(paths, ("\1\2", "\3" * 40, "\4")):
        path.write_text(json.dumps({"prompt": text}) + "\n")
    tasks = read_tasks(paths[:2], tokenizer, 5, 16, 0)
    assert tasks == {"short": [[1, 2]]}
    output = capsys.readouterr().out
    assert "short: 1 prompts" not in output.splitlines()[-1] and "long: " in output
    assert list(by_task(target, drafter, tasks, 6)) == ["short"]
    with pytest.raises(ValueError, match="two files are called short"):
        read_tasks([paths[0], paths[2]], tokenizer, 5, 16, 0)
    with pytest.raises(ValueError, match="no task has a prompt that fits"):
        read_tasks(paths[1:2], tokenizer, 5, 16, 0)


def test_tokens_of_a_loop_are_not_fresh():
    assert is_fresh([1, 2, 3, 1, 2, 3, 1], n=2) == [True, True, True, True, False, False, False]
    assert is_fresh([7, 7, 7], n=2) == [True, True, False]
    assert all(is_fresh([1, 2, 1, 3, 1, 4], n=2))
    # the first token is of the prefill; two rounds end with tokens 3 and 5, which are fresh
    assert count_fresh([1, 2, 3, 4, 5], [False, True, False, True, False]) == [4, 2]
    assert count_fresh([1, 2, 3, 4, 5], [False, True, False, True, True]) == [2, 1]  # cut off
    assert count_fresh([1] * 30, [False] * 30) == [LOOP - 1, LOOP - 1]


def test_a_loop_starts_where_a_text_begins_to_repeat_itself_word_for_word():
    assert loop_start([*range(10), *range(10)], n=4) == 10
    assert loop_start([*range(10), *range(6)], n=4) is None  # 2n - 1 tokens are needed
    assert loop_start([*range(10), *range(7)], n=4) == 10
    assert loop_start([5] * 20, n=4) == 1
    assert loop_start([*range(10), 11, *range(3, 10)], n=4) == 11
    assert loop_start([], n=4) is None


def test_the_fresh_al_is_that_of_whole_rounds_where_nothing_repeats():
    target = small_target()
    drafter = small_drafter(target)
    (result,) = generate(target, drafter, [[1, 2]], LOOP, Sampling(1.0))  # no room to repeat
    measured = evaluate(target, drafter, [[1, 2]], LOOP, Sampling(1.0))
    whole = [n + 1 for n in result.accepted]
    if sum(whole) > LOOP - 1:
        whole.pop()  # the last round was cut off
    assert measured.fresh.tolist() == [[sum(whole), len(whole)]]
    assert measured.fresh_mean == sum(whole) / len(whole)
    looped = evaluate(target, drafter, random_prompts(6), 80)
    assert looped.fresh[:, 0].sum() < looped.committed.sum()
