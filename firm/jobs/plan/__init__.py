"""Plans a run from its configuration and the models' `config.json`, without weights.

Models are built without storage, so their sizes are exact. Message sizes are counted in a simulated
round of the strategy, and memory in simulated passes, on tensors without content. Memory is an
estimate; `LEFT_OUT` lists what it excludes.
"""

from firm.jobs.plan.planning import LEFT_OUT, make_plan
from firm.jobs.plan.tables import paper_tables, plan_tables, print_plan, print_plans

__all__ = ["LEFT_OUT", "make_plan", "paper_tables", "plan_tables", "print_plan", "print_plans"]
