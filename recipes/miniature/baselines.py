"""Baselines that predict preferences from a reply's length or from its words.

A reward model is worth its parameters only if it beats these two Bradley-Terry models, fitted to
the same pairs: the log-odds that a reply is preferred are linear in a difference of features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix, vstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from recipes.miniature.preferences import Preference


@dataclass(frozen=True)
class Accuracy:
    """Share of correctly predicted pairs."""

    accuracy: float
    """Share in [0, 1]; a tie counts one half."""
    standard_error: float
    """sqrt(p (1 - p) / n)."""
    num_pairs: int


def pair_accuracy(margins: Sequence[float] | np.ndarray) -> Accuracy:
    """Returns the share of positive margins [n], chosen minus rejected reply, n > 0.

    >>> pair_accuracy([1.0, 0.5, -2.0, 0.0])
    Accuracy(accuracy=0.625, standard_error=0.24206145913796356, num_pairs=4)
    """
    margins = np.asarray(margins, dtype=float)
    share = float((np.sign(margins) + 1).mean() / 2)
    return Accuracy(share, math.sqrt(share * (1 - share) / len(margins)), len(margins))


def length_margins(train: Sequence[Preference], held_out: Sequence[Preference]) -> np.ndarray:
    """Returns the margins of held-out pairs by the replies' log-lengths, shape [n].

    Whether longer or shorter wins is learned from the training pairs.
    """

    def difference(pairs: Sequence[Preference]) -> csr_matrix:
        return csr_matrix(
            [[math.log1p(len(p.chosen)) - math.log1p(len(p.rejected))] for p in pairs]
        )

    return _bradley_terry_margins(difference(train), difference(held_out), penalty=1.0)


def bag_of_words_margins(train: Sequence[Preference], held_out: Sequence[Preference]) -> np.ndarray:
    """Returns the margins of held-out pairs by the replies' tf-idf words and word pairs, shape [n].

    Vocabulary and document frequencies come from the training replies.
    """
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectorizer.fit([reply for pair in train for reply in (pair.chosen, pair.rejected)])

    def difference(pairs: Sequence[Preference]) -> csr_matrix:
        chosen = vectorizer.transform([pair.chosen for pair in pairs])
        return csr_matrix(chosen - vectorizer.transform([pair.rejected for pair in pairs]))

    # 0.3: best of a few in cross-validation on HH-RLHF's training pairs
    return _bradley_terry_margins(difference(train), difference(held_out), penalty=0.3)


def _bradley_terry_margins(
    train: csr_matrix, held_out: csr_matrix, *, penalty: float
) -> np.ndarray:
    """Returns `held_out @ w`, w fitted so that the rows of `train` are preferred, [n, F] @ [F]."""
    model = LogisticRegression(C=penalty, fit_intercept=False)
    num_pairs = len(train.indptr) - 1
    model.fit(vstack([train, -train]), np.repeat([1, -1], num_pairs))
    return model.decision_function(held_out)
