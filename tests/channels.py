"""A network in memory, whose messages a test can read and spoil."""

from collections.abc import Callable

from firm.network.site import Site
from firm.network.sites import Lost


class MemoryChannel:
    """Carries messages to sites of this process; whatever a test does to them on the way."""

    def __init__(self, sites: dict[str, Site]):
        self.sites = sites
        self.spoil: Callable[[str, bytes], bytes | None] = lambda site, answer: answer
        self.asked: list[tuple[str, bytes]] = []
        self.answered: list[tuple[str, bytes]] = []
        self.timeouts: list[float] = []
        self.back: list[str] = []

    def ask(self, messages, *, timeout):
        self.timeouts.append(timeout)
        answers = {}
        for site, message in messages.items():
            self.asked.append((site, message))
            answer = self.spoil(site, self.sites[site].answer(message))
            answers[site] = Lost("no answer within 5 s") if answer is None else answer
            self.answered.append((site, answer or b""))
        return answers

    def returned(self):
        return self.back

    def close(self):
        self.sites = {}
