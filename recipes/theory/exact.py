"""Values, gradients and constants of the theory, by linear algebra instead of sampling.

θ are the logits of a tabular softmax policy, [..., d] with d = S A in the order of the states;
leading dimensions are batch dimensions in every function. All in float64.
"""

import numpy as np

from recipes.theory.mdp import Mdp

SCORE_BOUND = 2**0.5
"""C_ψ of Assumption 3(a) for a tabular softmax: ‖ψ(s, a)‖² = (1 - π_a)² + Σ_{b≠a} π_b² < 2."""


def policy(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns π_θ(a | s), [..., d] to [..., S, A]."""
    logits = theta.reshape(*theta.shape[:-1], mdp.num_states, mdp.num_actions)
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def state_kernel(mdp: Mdp, probabilities: np.ndarray) -> np.ndarray:
    """Returns P_π(s' | s), [..., S, A] to [..., S, S]."""
    return np.einsum("...sa,sat->...st", probabilities, mdp.kernel)


def values(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns V^j(s) = E[Σ_t γᵗ r^j], the solution of Bellman's equation, shape [..., M, S]."""
    probabilities = policy(mdp, theta)
    rewards = np.einsum("...sa,jsa->...sj", probabilities, mdp.rewards)
    system = np.eye(mdp.num_states) - mdp.gamma * state_kernel(mdp, probabilities)
    return np.linalg.solve(system, rewards).swapaxes(-1, -2)


def action_values(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns Q^j(s, a), shape [..., M, S, A]."""
    after = np.einsum("sat,...jt->...jsa", mdp.kernel, values(mdp, theta))
    return mdp.rewards + mdp.gamma * after


def returns(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns J^j(θ) = (1 - γ) E_ρ₀[V^j], shape [..., M].

    The paper's Jʲ is Σ_{t≥1} γᵗ rₜ without the factor, under which its gradient estimator (Eq. 10)
    is off by 1/(1 - γ): the mean of δψ over the normalised visitation is the gradient of this J.
    """
    return (1 - mdp.gamma) * values(mdp, theta) @ mdp.start


def visitation(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns the discounted visitation ν(s) = (1 - γ) Σ_t γᵗ P(s_t = s), shape [..., S], sum 1.

    It is the stationary distribution of the restart kernel γ P_π + (1 - γ) ρ₀.
    """
    system = np.eye(mdp.num_states) - mdp.gamma * state_kernel(mdp, policy(mdp, theta))
    start = np.broadcast_to(mdp.start[:, None], (*theta.shape[:-1], mdp.num_states, 1))
    return (1 - mdp.gamma) * np.linalg.solve(system.swapaxes(-1, -2), start)[..., 0]


def return_gradients(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns ∇J^j(θ) by the policy gradient theorem, ν(s) π(a|s) A^j(s, a), shape [..., M, d]."""
    probabilities = policy(mdp, theta)
    action = action_values(mdp, theta)  # [..., M, S, A]
    mean = np.einsum("...sa,...jsa->...js", probabilities, action)
    visits = visitation(mdp, theta)[..., None] * probabilities  # [..., S, A]
    gradients = visits[..., None, :, :] * (action - mean[..., None])
    return gradients.reshape(*gradients.shape[:-2], mdp.num_parameters)


def stationary_distribution(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns d_π(s) of the chain P_π, on which critics are trained; shape [..., S], sum 1."""
    size = mdp.num_states
    chain = state_kernel(mdp, policy(mdp, theta))
    # d (I - P + 1 1ᵀ) = 1ᵀ has the stationary distribution as its only solution
    system = np.eye(size) - chain + np.ones((size, size))
    ones = np.ones((*theta.shape[:-1], size, 1))
    return np.linalg.solve(system.swapaxes(-1, -2), ones)[..., 0]


def td_matrix(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns A_π = E[(γ φ(s') - φ(s)) φ(s)ᵀ] of Assumption 2(c), shape [..., d2, d2]."""
    chain = state_kernel(mdp, policy(mdp, theta))
    differences = mdp.gamma * chain @ mdp.features - mdp.features  # [..., S, d2]
    weighted = stationary_distribution(mdp, theta)[..., None] * mdp.features
    return differences.swapaxes(-1, -2) @ weighted


def td_fixed_point(mdp: Mdp, theta: np.ndarray) -> np.ndarray:
    """Returns w*^j, at which the mean TD update E[δ^j φ] vanishes, shape [..., M, d2]."""
    weighted = stationary_distribution(mdp, theta)[..., None] * mdp.features  # [..., S, d2]
    rewards = np.einsum("...sa,jsa->...sj", policy(mdp, theta), mdp.rewards)
    target = weighted.swapaxes(-1, -2) @ rewards  # [..., d2, M]
    return -np.linalg.solve(td_matrix(mdp, theta).swapaxes(-1, -2), target).swapaxes(-1, -2)


def uniform_lambda_a(mdp: Mdp) -> float:
    """Returns a λ_A that holds for every policy, as Assumption 2(c) asks; positive.

    By Cauchy-Schwarz -xᵀA_π x ≥ (1 - γ) E_d[(φᵀx)²], and no policy visits a state s' less often
    than min_{s,a} P(s' | s, a).
    """
    least = mdp.kernel.min(axis=(0, 1))  # [S]
    covariance = mdp.features.T @ (least[:, None] * mdp.features)
    return (1 - mdp.gamma) * float(np.linalg.eigvalsh(covariance)[0])


def critic_radius(mdp: Mdp) -> float:
    """Returns R_w = 2 r_max / λ_A, the radius of the critics' ball (Appendix C)."""
    return 2 * mdp.r_max / uniform_lambda_a(mdp)


def gradient_bound(mdp: Mdp) -> float:
    """Returns R = C_ψ (r_max + (1 + γ) R_w), Lemma 7's bound on every stochastic gradient."""
    return SCORE_BOUND * (mdp.r_max + (1 + mdp.gamma) * critic_radius(mdp))
