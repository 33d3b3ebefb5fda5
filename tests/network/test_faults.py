"""The conformance suite: whatever a client does, the run ends as if it had not been drawn."""

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from benchmarks import faults
from tests.smoke import POLICY


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl_context is deprecated")  # FLARE's session
@pytest.mark.parametrize("engine", list(faults.FAULTS))
def test_a_fault_is_noticed_in_time_named_and_without_a_trace_in_the_adapter(engine, monkeypatch):
    if engine == "local":  # the others read the shipped policy, in processes of their own
        small = dict(faults._OVERRIDES) | {"policy.path": str(POLICY)}
        monkeypatch.setattr(faults, "_OVERRIDES", list(small.items()))
    outcomes = faults.outcomes_of(engine)
    assert [outcome.fault for outcome in outcomes] == list(faults.FAULTS[engine])
    for outcome in outcomes:
        assert outcome.seconds < faults.TIMEOUT + faults.MEETING_TIMEOUT, outcome
        if (engine, outcome.fault) == ("processes", faults.KILLED):
            assert outcome.message.startswith("the run stops: "), outcome  # torchrun ends them all
            assert faults.CULPRIT in outcome.message, outcome
        else:
            assert outcome.message.startswith(f"{faults.CULPRIT}: "), outcome
            assert outcome.equal, outcome
