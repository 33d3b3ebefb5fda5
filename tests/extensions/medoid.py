"""A robust rule of another package: only the update nearest to the others' median counts."""

import torch

from firm.federation.aggregation import update_matrix
from firm.federation.options.robust import robust_rule


@robust_rule("medoid")
def medoid(start, updates, cfg, num_attackers):
    """Returns the update with the smallest distance to the median, and who sent it."""
    rows = update_matrix(start, [update.adapter for update in updates])
    distances = (rows - rows.median(dim=0).values).norm(dim=1)
    nearest = updates[int(torch.argmin(distances))]
    return [nearest], {"chosen": [nearest.client]}
