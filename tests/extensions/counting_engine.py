"""An engine of another package: the local one, which tells how often it was asked."""

from firm.federation import LocalEngine
from firm.federation.engines import engine


@engine("counting")
class CountingEngine(LocalEngine):
    """Counts its calls."""

    num_calls = 0

    def map(self, request, clients):
        self.num_calls += 1
        return super().map(request, clients)

    def close(self):
        print(f"counting engine: {self.num_calls} calls")  # noqa: T201
        super().close()
