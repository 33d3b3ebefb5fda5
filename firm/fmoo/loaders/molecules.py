"""QM9: molecules as dense graphs, with eleven properties."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from firm.base.cache import cache_folder
from firm.base.randomness import derive_seed
from firm.fmoo.config import DatasetConfig
from firm.fmoo.loaders.sources import Layout, Table, find_file, read_tables
from firm.fmoo.loaders.splitting import complete_splits, take
from firm.fmoo.loaders.tables import regression, standardise
from firm.fmoo.task_data import Splits

QM9 = Layout(("atoms", "positions", "bonds", "targets"))

QM9_PROPERTIES = {
    "mu": 0,
    "alpha": 1,
    "homo": 2,
    "lumo": 3,
    "r2": 5,
    "zpve": 6,
    "u0_atom": 12,
    "u_atom": 13,
    "h_atom": 14,
    "g_atom": 15,
    "cv": 11,
}
"""Columns of the eleven objectives in PyTorch Geometric's QM9."""

QM9_SIZES = (40_000, 10_000, 10_000)
"""Training, validation and test molecules (Appendix D.1; halving its 20k is our choice)."""

MAX_ATOMS = 29
"""Largest number of atoms of a molecule in QM9."""


def qm9(cfg: DatasetConfig) -> Splits:
    """Returns QM9: eleven properties of small molecules, standardised on the training split."""
    if find_file(cfg.path, "*.npz") is None:
        tables = {"train": dense_molecules(_geometric_qm9(cfg.path))}
    else:
        tables = read_tables(cfg.path, QM9)
    for table in tables.values():
        table["graphs"] = _pack_molecules(table)
    if len(tables) == 1:
        whole = tables["train"]
        generator = np.random.default_rng(derive_seed(cfg.seed, "molecules"))
        drawn = generator.permutation(len(whole["graphs"]))[: sum(QM9_SIZES)]
        cuts = len(drawn) * np.cumsum(QM9_SIZES)[:2] // sum(QM9_SIZES)
        names = ("train", "validation", "test")
        tables = {
            split: take(whole, indices)
            for split, indices in zip(names, np.split(drawn, cuts), strict=True)
        }
    parts = complete_splits(tables, cfg, order="random")
    scaled = standardise({split: part["targets"] for split, part in parts.items()})
    for split, values in scaled.items():
        parts[split]["targets"] = values
    return regression(parts, "graphs", "targets", tuple(QM9_PROPERTIES))


def dense_molecules(graphs: Iterable[Any]) -> Table:
    """Converts molecules to the arrays of QM9's layout, for `numpy.savez_compressed`.

    Args:
        graphs: PyTorch Geometric graphs with `x` [n, 11], `pos` [n, 3], `edge_index` [2, E],
            `edge_attr` [E, 4] and `y` [1, 19].

    Returns:
        `atoms` float32 [N, 29, 11] and `positions` float32 [N, 29, 3], zero where there is no atom;
        `bonds` uint8 [N, 29, 29], 0 for none or 1 to 4 for its type; `targets` float32 [N, 11].
    """
    rows: dict[str, list[np.ndarray]] = {name: [] for name in QM9.arrays}
    for graph in graphs:
        num_atoms = len(graph.x)
        atoms = np.zeros((MAX_ATOMS, 11), dtype=np.float32)
        positions = np.zeros((MAX_ATOMS, 3), dtype=np.float32)
        bonds = np.zeros((MAX_ATOMS, MAX_ATOMS), dtype=np.uint8)
        atoms[:num_atoms] = graph.x.numpy()
        positions[:num_atoms] = graph.pos.numpy()
        source, target = graph.edge_index.numpy()
        bonds[source, target] = graph.edge_attr.numpy().argmax(axis=1) + 1
        rows["atoms"].append(atoms)
        rows["positions"].append(positions)
        rows["bonds"].append(bonds)
        rows["targets"].append(graph.y.numpy()[0, list(QM9_PROPERTIES.values())])
    return {name: np.stack(values) for name, values in rows.items()}


def _pack_molecules(table: Table) -> np.ndarray:
    """Packs molecules as float32 [N, 29, 43]: atom features, position and bonds of each atom."""
    num = len(table["atoms"])
    shapes = {
        "atoms": (num, MAX_ATOMS, 11),
        "positions": (num, MAX_ATOMS, 3),
        "bonds": (num, MAX_ATOMS, MAX_ATOMS),
        "targets": (num, len(QM9_PROPERTIES)),
    }
    for name, shape in shapes.items():
        if table[name].shape != shape:
            raise ValueError(
                f"QM9's {name} must have the shape {list(shape)}, got {list(table[name].shape)}."
            )
    if table["bonds"].max(initial=0) > 4:
        raise ValueError(f"QM9's bonds must be in 0..4, got {table['bonds'].max()}.")
    parts = [table[name].astype(np.float32) for name in ("atoms", "positions", "bonds")]
    return np.concatenate(parts, axis=2)


def _geometric_qm9(path: str | None) -> Iterable[Any]:
    try:
        from torch_geometric.datasets import QM9 as GeometricQM9  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "QM9 is downloaded by PyTorch Geometric, which is not installed: pip install "
            f"torch_geometric, or provide {QM9.in_words()}."
        ) from None
    folder = cache_folder("qm9") if path is None else Path(path).expanduser()
    return GeometricQM9(str(folder))
