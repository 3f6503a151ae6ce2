"""How many drafts a round of decoding verifies: as many as pay, none where none does.

It knows no models: decoding tells it what each round took, and how many drafts were accepted.

    pytest tests/test_draft_length.py
"""

import time
from collections import deque

import numpy


class AutoLength:
    """How many drafts the next round verifies: n for each text on average, n = 0..W, those that
    promise most tokens per second,

        (texts + sum of the largest n * texts of all S_k) / seconds of a round of n

    S_k, how often the first k drafts of a text survived lately, is counted for each text and shrunk
    to the mean of all. So a text may get more drafts than another (not on a GPU). Seconds are of
    real rounds. n = 0 is a plain step, without a drafter. Now and then another n is tried. All is
    decided before a round drafts, so the text keeps the target's distribution; which of its texts
    is drawn depends on the clock, too."""

    RECENT = 9  # rounds whose seconds count
    MEMORY = 0.98  # how much an older round counts, beside the one after it
    PRIOR = 8.0  # the mean of all texts weighs as much as so many rounds of a text
    KEPT = 8  # rounds that are decided on at once, where all drafts are best, or none
    CLEARLY = 1.03  # better than what is used
    NEARLY = 0.8  # a share of the best speed: tried before others that are slower
    TRIALS_COST = 0.01  # of the speed: so much is spent on rounds with other numbers
    WAITS = (16, 256)  # rounds between two trials, at least and at most

    def __init__(self, W: int, clock=time.perf_counter):
        self.W = W
        self.clock = clock
        # {n: {number of texts: seconds of the last rounds}}, and of each what it usually is
        self.timed = {n: {} for n in self._all}
        self.usual = {n: {} for n in self._all}
        # of draft k: how often accepted, how often judged; at first it is hoped to be good
        self.counts = numpy.ones((2, W)) * [[3.2], [4.0]]
        self.num_rounds = 0
        self.last_round = [0] * (W + 1)  # that verified n
        self.n = self.best = None  # of this round; the fastest
        self.once_more = None  # the number that the next round verifies, too
        self.next_trial = self.WAITS[0]
        self.start(0)

    def __repr__(self) -> str:
        return f"AutoLength({self.W})"

    def start(self, num_texts: int, equal: bool = False) -> None:
        """New texts 0, 1, ... are decoded; what was learned stays. equal: all get as many drafts,
        because shorter rows are computed to the longest one's end, as on a GPU."""
        self.equal = equal
        self.of_text = numpy.zeros((num_texts, 2, self.W))
        self.keep_until = 0  # this round n stays

    def choose(self, texts: list[int]) -> list[int]:
        """How many drafts of each of these texts the next round verifies."""
        self.n = self._average(texts)
        if self.equal or len(texts) == 1 or self.n in (0, self.W):
            return [self.n] * len(texts)
        likeliest = (-self._survival(texts).ravel()).argsort(kind="stable")
        owners = likeliest[: self.n * len(texts)] // self.W
        return numpy.bincount(owners, minlength=len(texts)).tolist()

    def _average(self, texts: list[int]) -> int:
        """The n of the next round: one that has to be measured, or the fastest."""
        if self.num_rounds < self.keep_until:
            return self.best
        if self.once_more is not None:
            n, self.once_more = self.once_more, None
            return n
        known = self._seconds(len(texts))
        for n in (self.W, 0):
            if n not in known:
                self.once_more = n  # after a change the first round is slow: a second tells more
                return n
        n = self._fastest(texts, known)
        if n == self.best and n in (0, self.W):  # to decide takes time, too
            self.keep_until = min(self.num_rounds + self.KEPT, self.next_trial)
        return n

    def _fastest(self, texts: list[int], known: dict[int, float]) -> int:
        """The n that promises most tokens per second, given `_seconds`; now and then another."""
        # drafting is guessed to take half of what a whole round takes more than a plain step
        guesses = {1: max(known[0], (known[0] + known[self.W]) / 2)} | known
        seconds = numpy.interp(self._all, *zip(*sorted(guesses.items())))
        survival = self._survival(texts)
        if self.equal:
            accepted = survival.sum(0).cumsum()
        else:
            accepted = numpy.sort(survival.ravel())[::-1].cumsum()[len(texts) - 1 :: len(texts)]
        speeds = (len(texts) + numpy.append(0.0, accepted)) / seconds
        best = int(speeds.argmax())
        if self.best is not None and speeds[best] < self.CLEARLY * speeds[self.best]:
            best = self.best
        if best != self.best:
            self.best = best
            self.next_trial = min(self.next_trial, self.num_rounds + self.WAITS[0])
        if self.num_rounds < self.next_trial:
            return best
        return self._trial(speeds, seconds)

    def _trial(self, speeds: numpy.ndarray, seconds: numpy.ndarray) -> int:
        """Another number than the best: of those that are nearly as good the one that has not been
        used for longest. The more it costs, the later is the next trial."""
        others = [n for n in self._all if n != self.best]
        near = [n for n in others if speeds[n] > self.NEARLY * speeds[self.best]]
        if near:
            n = self.once_more = min(near, key=self.last_round.__getitem__)
        else:
            n = max(others, key=speeds.__getitem__)
        # in rounds of the best
        lost = (1 - speeds[n] / speeds[self.best]) * seconds[n] / seconds[self.best]
        wait = (2 if near else 1) * lost / self.TRIALS_COST
        self.next_trial = self.num_rounds + int(numpy.clip(wait, *self.WAITS))
        return n

    @property
    def _all(self) -> range:
        return range(self.W + 1)

    def _seconds(self, num_texts: int) -> dict[int, float]:
        """{n: seconds of a round} with so many texts, of all n that were verified before: between
        the numbers of texts that were seen, in a straight line."""
        return {
            n: float(numpy.interp(num_texts, *zip(*sorted(usual.items()))))
            for n, usual in self.usual.items()
            if usual
        }

    def _survival(self, texts: list[int]) -> numpy.ndarray:
        """S_1..S_W of each text (B,W)."""
        accepted, judged = self.of_text[texts].transpose(1, 0, 2)  # (B, W) each
        mean = self.counts[0] / self.counts[1]
        return ((accepted + self.PRIOR * mean) / (judged + self.PRIOR)).cumprod(1)

    def learn(self, texts: list[int], judged, accepted, seconds: float) -> None:
        """Of the round of `choose`: how many drafts of each text were judged and accepted. Drafts
        that a lookup did not find count as judged, if it found others."""
        n = self.n if any(judged) else 0
        times = self.timed[n].setdefault(len(texts), deque(maxlen=self.RECENT))
        times.append(seconds)
        # the lower quartile, because other work on the machine only slows a round down
        self.usual[n][len(texts)] = sorted(times)[len(times) // 4]
        self.num_rounds += 1
        self.last_round[n] = self.num_rounds
        if n == 0:
            return
        numbers = numpy.arange(1, self.W + 1)
        accepted, judged = numpy.array(accepted)[:, None], numpy.array(judged)[:, None]
        reached = numbers <= numpy.minimum(accepted + 1, judged)
        new = numpy.stack([numbers <= accepted, reached], 1)  # (B, 2, W)
        self.of_text[texts] = self.MEMORY * self.of_text[texts] + new
        self.counts = self.MEMORY * self.counts + new.sum(0)
