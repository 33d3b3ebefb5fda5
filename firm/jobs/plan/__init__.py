"""What a run would do, from its configuration and the models' `config.json` alone.

Models are built without storage, so sizes are those of the real ones; messages are counted on a
round of the strategy without content, and memory on passes without content. It stays an estimate:
`LEFT_OUT` says of what.
"""

from firm.jobs.plan.planning import LEFT_OUT, make_plan
from firm.jobs.plan.printing import print_plan, print_plans
from firm.jobs.plan.tables import plan_tables

__all__ = ["LEFT_OUT", "make_plan", "plan_tables", "print_plan", "print_plans"]
