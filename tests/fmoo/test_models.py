import pytest
import torch
from torch.nn import functional

from firm.fmoo.config import MODELS, ModelConfig
from firm.fmoo.models import Dropout, build_model, num_parameters
from firm.fmoo.task_data import LOSSES, TaskData


def names(num_objectives):
    return tuple(f"objective_{j}" for j in range(num_objectives))


def image_data(channels, side, num_objectives, num_classes, num=3):
    generator = torch.Generator().manual_seed(0)
    return TaskData(
        inputs=torch.randint(
            256, (num, channels, side, side), dtype=torch.uint8, generator=generator
        ),
        targets=torch.randint(num_classes, (num, num_objectives), generator=generator),
        objectives=names(num_objectives),
        losses=("cross_entropy",) * num_objectives,
        num_outputs=(num_classes,) * num_objectives,
    )


def float_data(shape, num_objectives, loss="squared", num=3):
    return TaskData(
        inputs=torch.randn(num, *shape, generator=torch.Generator().manual_seed(0)),
        targets=torch.zeros(num, num_objectives),
        objectives=names(num_objectives),
        losses=(loss,) * num_objectives,
    )


def face_data():
    return TaskData(
        inputs=torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
        targets=torch.zeros(2, 40),
        objectives=names(40),
        losses=("binary",) * 40,
    )


def token_data():
    return TaskData(
        inputs=torch.arange(160).reshape(2, 80) % 50,
        targets=torch.tensor([[3], [49]]),
        objectives=("next_character",),
        losses=("cross_entropy",),
        num_outputs=(50,),
        num_tokens=50,
    )


def molecule_data(num=4, seed=0):
    """Random molecules of 5 to 12 atoms."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.zeros(num, 29, 43)
    for molecule in packed:
        size = int(torch.randint(5, 13, (1,), generator=generator))
        molecule[:size, 0] = 1
        molecule[:size, 1:11] = torch.rand(size, 10, generator=generator)
        molecule[:size, 11:14] = torch.randn(size, 3, generator=generator)
        bonds = torch.randint(5, (size, size), generator=generator).float().triu(1)
        molecule[:size, 14 : 14 + size] = bonds + bonds.t()
    return TaskData(packed, torch.zeros(num, 11), names(11), ("squared",) * 11)


EXAMPLES = {
    "lenet": image_data(1, 28, 2, 10),
    "cifar_mnist_cnn": image_data(3, 32, 2, 10),
    "resnet18": face_data(),
    "molecule_net": molecule_data(),
    "cifar_cnn": image_data(3, 32, 1, 10),
    "fashion_cnn": image_data(1, 28, 1, 10),
    "femnist_cnn": image_data(1, 28, 1, 62),
    "character_lstm": token_data(),
    "linear": float_data((99,), 1, "binary"),
    "mlp": float_data((64,), 8),
}


def as_inputs(data):
    return data.inputs.float() / 255 if data.inputs.dtype == torch.uint8 else data.inputs


def built(name, data=None, seed=0, **options):
    return build_model(ModelConfig(name=name, **options), data or EXAMPLES[name], seed=seed)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("lenet", 34_635),  # FedCMOO, D.3: 34.6k
        ("cifar_mnist_cnn", 1_726_508),  # D.3: 1.73M
        ("resnet18", 11_189_352),  # D.3: 11.2M
        ("molecule_net", 617_675),  # D.3: 617k
        ("cifar_cnn", 797_962),  # FedMGDA+, Table 2
        ("fashion_cnn", 21_840),  # Table 3
        ("femnist_cnn", 1_206_590),  # Table 4
        # 8 V + (8 + 256 + 2) 1024 + (256 + 256 + 2) 1024 + 257 V at V = 50
        ("character_lstm", 811_970),
        ("linear", 100),
    ],
)
def test_models_have_the_papers_numbers_of_parameters(name, total):
    assert num_parameters(built(name)) == total


def test_the_lenet_shares_28515_parameters_and_has_3060_in_each_head():
    model = built("lenet")
    assert num_parameters(model.encoder) == 28_515
    assert [num_parameters(head) for head in model.heads] == [3_060, 3_060]


@pytest.mark.parametrize("shape", [(7, 30), (5, 6, 4, 4)])
def test_dropout_is_that_of_torch_at_an_equal_seed(shape):
    inputs = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    inputs = inputs.to(memory_format=torch.channels_last) if len(shape) == 4 else inputs
    variants = [(False, functional.dropout), (True, functional.dropout2d)][: len(shape) - 1]
    for of_channels, peer in variants:
        dropout = Dropout(0.3, of_channels=of_channels)
        dropout.generator = torch.Generator().manual_seed(5)
        torch.manual_seed(5)
        assert torch.equal(dropout(inputs), peer(inputs, 0.3))


def test_dropout_keeps_the_mean_and_draws_channels_as_wholes():
    dropout = Dropout(0.2, of_channels=True)
    dropout.generator = torch.Generator().manual_seed(0)
    outputs = dropout(torch.ones(400, 50, 2, 2))
    assert outputs.mean() == pytest.approx(1.0, abs=0.02)  # 4 standard errors are 0.014
    assert set(outputs.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(outputs, outputs[:, :, :1, :1].expand_as(outputs))


def test_dropout_rests_in_evaluation_and_at_rate_zero():
    inputs = torch.rand(4, 5)
    assert Dropout(0.5).eval()(inputs) is inputs
    assert Dropout(0.0)(inputs) is inputs


def test_every_model_has_an_example_here():
    assert EXAMPLES.keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_each_objective_outputs_that_its_loss_takes(name):
    data = EXAMPLES[name]
    outputs = built(name).eval()(as_inputs(data))
    assert data.num_outputs is not None
    assert [tuple(output.shape) for output in outputs] == [
        (len(data), width) for width in data.num_outputs
    ]
    for j, loss in enumerate(data.losses):
        value = LOSSES[loss](outputs[j], data.targets[:, j])
        assert value.shape == ()
        assert value.isfinite()


@pytest.mark.parametrize("name", MODELS)
def test_the_encoders_parameters_come_first_and_a_loss_reaches_no_other_head(name):
    data, model = EXAMPLES[name], built(name).eval()
    owners = [key.split(".")[0] for key, _ in model.named_parameters()]
    assert owners == sorted(owners)  # "encoder" before "heads"
    if len(model.heads) == 1:
        return
    loss = LOSSES[data.losses[0]](model(as_inputs(data))[0], data.targets[:, 0])
    loss.backward()
    assert all(p.grad is None for p in model.heads[1].parameters())
    assert any(p.grad is not None for p in model.encoder.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_models_state_is_its_parameters(name):
    model = built(name)
    assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}


def test_the_seed_decides_the_parameters_and_global_generators_stay():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (built("lenet", seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["heads.0.0.weight"], other["heads.0.0.weight"])


@pytest.mark.parametrize(
    "name", ["lenet", "cifar_mnist_cnn", "cifar_cnn", "fashion_cnn", "femnist_cnn"]
)
def test_the_memory_layout_of_images_does_not_matter(name):
    inputs, model = as_inputs(EXAMPLES[name]), built(name).eval()
    expected = torch.cat(model(inputs), dim=1)
    model.to(memory_format=torch.channels_last)
    outputs = torch.cat(model(inputs.to(memory_format=torch.channels_last)), dim=1)
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("lenet", [(0.5, False)] * 3),
        ("cifar_mnist_cnn", [(0.5, False)] * 2),
        ("fashion_cnn", [(0.5, True), (0.5, False)]),
        ("femnist_cnn", [(0.25, False), (0.5, False)]),
        ("cifar_cnn", []),
        ("resnet18", []),
        ("character_lstm", []),
    ],
)
def test_dropout_is_the_papers_unless_the_configuration_says_otherwise(name, layers):
    def found(model):
        dropouts = [module for module in model.modules() if isinstance(module, Dropout)]
        return [(dropout.rate, dropout.of_channels) for dropout in dropouts]

    assert found(built(name)) == layers
    assert found(built(name, dropout=0.1)) == [(0.1, of_channels) for _, of_channels in layers]


@pytest.mark.parametrize("side", [14, 16, 28])
def test_the_lenet_fits_the_size_of_its_images(side):
    data = image_data(1, side, 2, 10)
    assert built("lenet", data)(as_inputs(data))[0].shape == (3, 10)


def test_the_width_of_the_hidden_layers_is_the_configurations():
    # 64 inputs, 5 and 7 hidden units, 8 outputs, each with a bias
    assert num_parameters(built("mlp", hidden=[5, 7])) == 65 * 5 + 6 * 7 + 8 * 8


@pytest.mark.parametrize("position", [0, 79])
def test_the_next_character_depends_on_the_whole_sequence(position):
    model, tokens = built("character_lstm").eval(), token_data().inputs
    changed = tokens.clone()
    changed[0, position] = 7
    outputs, others = model(tokens)[0], model(changed)[0]
    assert not torch.equal(outputs[0], others[0])
    assert torch.equal(outputs[1], others[1])


def by_the_book(encoder, molecule):
    """The features of one molecule, edge by edge, each with its 64 x 64 matrix."""
    num = int((molecule[:, 0] != 0).sum())
    atoms, positions, bonds = molecule[:num].split([11, 3, 29], dim=1)
    hidden = torch.relu(encoder.embed(atoms))
    for _ in range(3):
        messages = []
        for i in range(num):
            received = []
            for j in range(num):
                if i != j:
                    kind = functional.one_hot(bonds[i, j].long(), 5)[1:].float()
                    distance = (positions[i] - positions[j]).norm().reshape(1)
                    units = torch.relu(encoder.edge_hidden(torch.cat([kind, distance])))
                    received.append(hidden[j] @ encoder.edge_matrix(units).reshape(64, 64))
            messages.append(encoder.root(hidden[i]) + torch.stack(received).mean(dim=0))
        hidden = encoder.update(torch.relu(torch.stack(messages)), hidden)
    query = cell = read = torch.zeros(1, 64)
    for _ in range(3):
        query, cell = encoder.readout(torch.cat([query, read], dim=1), (query, cell))
        read = (hidden @ query[0]).softmax(dim=0) @ hidden
        read = read.unsqueeze(0)
    return torch.relu(encoder.out(torch.cat([query, read], dim=1)))[0]


def test_the_graph_network_is_message_passing_with_a_matrix_per_edge():
    encoder, inputs = built("molecule_net").encoder, molecule_data().inputs
    expected = torch.stack([by_the_book(encoder, molecule) for molecule in inputs])
    torch.testing.assert_close(encoder(inputs), expected, atol=1e-5, rtol=1e-4)


def test_the_order_of_atoms_does_not_matter_to_the_graph_network():
    encoder, inputs = built("molecule_net").encoder, molecule_data().inputs
    order = torch.randperm(29, generator=torch.Generator().manual_seed(3))
    columns = torch.cat([torch.arange(14), 14 + order])
    torch.testing.assert_close(
        encoder(inputs[:, order][:, :, columns]), encoder(inputs), atol=1e-5, rtol=1e-4
    )


def test_an_unknown_model_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"one of .*, got 'le_net'; did you mean 'lenet'"):
        built("le_net", EXAMPLES["lenet"])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("lenet", "mlp", r"lenet takes images \[N, C, H, W\], got inputs of shape \[3, 64\]"),
        ("character_lstm", "lenet", r"character_lstm takes int64 tokens"),
        ("molecule_net", "mlp", r"molecule_net takes QM9's packed graphs"),
        ("linear", "character_lstm", r"linear takes features or images, got tokens"),
    ],
)
def test_inputs_that_a_model_does_not_take_are_refused(name, data, message):
    with pytest.raises(ValueError, match=message):
        built(name, EXAMPLES[data])


def test_images_that_are_too_small_are_refused():
    for name, smallest in [("lenet", 8), ("cifar_cnn", 16), ("fashion_cnn", 16)]:
        built(name, image_data(1, smallest, 1, 10))
        with pytest.raises(ValueError, match=f"{name} takes images of at least {smallest} pixels"):
            built(name, image_data(1, smallest - 1, 1, 10))


@pytest.mark.parametrize("options", [{"dropout": 1.0}, {"dropout": -0.1}])
def test_a_dropout_that_is_no_probability_is_refused(options):
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and less than 1"):
        ModelConfig(**options)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [([], "hidden must be non-empty"), ([4, 0], r"hidden\.1 must be at least 1, got 0")],
)
def test_hidden_layers_without_units_are_refused(hidden, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(name="mlp", hidden=hidden)
