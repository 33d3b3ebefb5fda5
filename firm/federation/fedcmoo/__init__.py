"""FedCMOO's estimate of a Gram matrix from compressed Jacobians, for its strategies."""
