"""The fused losses repeat the plain formulas' numbers, whatever they are given: "numba" and "torch" against "plain".

numba compiles anew for each pair of dtypes, two to four seconds each: index and float targets serve most tests.
"""

import pytest
import torch

from ghmdet.functional import ghmc_loss, ghmr_loss
from ghmdet.losses.kernels import implementation

# The gradient has the inputs' type: two roundings of it, and for the smallest numbers one step of what it can hold.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2**-24}


def outcome(name, function, inputs, *args, factor=1.0, **settings):
    """Loss and gradient as one implementation finds them."""
    inputs = inputs.detach().requires_grad_()
    with implementation(name):
        loss = function(inputs, *args, **settings)
        (loss * factor).backward()
    return loss.detach(), inputs.grad


def assert_same_as_plain(name, function, inputs, *args, relative=2e-6, **settings):
    loss, gradient = outcome(name, function, inputs, *args, **settings)
    expected_loss, expected = outcome("plain", function, inputs, *args, **settings)
    assert (loss.dtype, gradient.dtype, gradient.shape) == (torch.float32, inputs.dtype, inputs.shape)
    torch.testing.assert_close(loss, expected_loss, rtol=relative, atol=0)
    relative = max(relative, ROUNDING[inputs.dtype])
    largest = expected.abs().max().item() if expected.numel() else 0.0
    atol = max(relative * largest / 100, SMALLEST[inputs.dtype])
    torch.testing.assert_close(gradient, expected, rtol=relative, atol=atol)


# Shapes


@pytest.mark.parametrize("shape", [(), (7,), (0,), (0, 4), (3, 0), (5, 1), (6, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_dense_targets_of_any_shape(fused, shape):
    inputs, targets = torch.randn(shape), torch.rand(shape)
    assert_same_as_plain(fused, ghmc_loss, inputs, targets)
    assert_same_as_plain(fused, ghmr_loss, inputs, targets, mu=0.5)


@pytest.mark.parametrize(
    ("shape", "class_dim"),
    [
        ((4,), -1),
        ((0, 4), -1),
        ((5, 1), -1),
        ((5, 0), -1),
        ((6, 3), -1),
        ((6, 3), 0),
        ((2, 6, 3), -1),
        ((2, 6, 3), 1),
        ((2, 6, 3), 0),
        ((2, 5, 3, 4), 1),
        ((2, 5, 3, 4), -2),
        ((2, 1, 3, 4), 1),
    ],
)
def test_index_targets_with_the_classes_in_any_dimension(fused, shape, class_dim):
    logits = torch.randn(shape)
    classes = torch.randint(-1, max(1, shape[class_dim]), logits.mean(class_dim).shape) if logits.dim() > 1 else None
    if classes is None:
        classes = torch.tensor(2)
    if shape[class_dim] == 0:
        classes = torch.full_like(classes, -1)
    assert_same_as_plain(fused, ghmc_loss, logits, classes, class_dim=class_dim)


@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 2 * 128 * 1024 + 1])
def test_sizes_around_the_edges_of_blocks(fused, n):
    inputs = torch.randn(n) * 2 - 2
    assert_same_as_plain(fused, ghmc_loss, inputs, (torch.rand(n) < 0.1).float())
    assert_same_as_plain(fused, ghmr_loss, inputs, torch.randn(n), mu=0.5)


@pytest.mark.parametrize(("classes", "rows"), [(3, 5_000), (1025, 200)])
@pytest.mark.parametrize("class_dim", [0, 1])
def test_rows_that_end_within_a_block(fused, classes, rows, class_dim):
    shape = (classes, rows) if class_dim == 0 else (rows, classes)
    targets, valid = torch.randint(-1, classes, (rows,)), torch.rand(rows) < 0.8
    weight = torch.rand(classes, 1) if class_dim == 0 else torch.rand(1, classes)
    assert_same_as_plain(
        fused, ghmc_loss, torch.randn(shape) - 2, targets, class_dim=class_dim, valid=valid, weight=weight
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_numbers(fused, threads, dtype):
    inputs, classes = (torch.randn(3000, 80) - 3).to(dtype), torch.randint(-1, 80, (3000,))
    threads(1)
    alone = outcome(fused, ghmc_loss, inputs, classes)
    threads(2)
    together = outcome(fused, ghmc_loss, inputs, classes)
    if fused == "numba":
        assert all(torch.equal(*pair) for pair in zip(alone, together))
    else:  # torch's own operations end their vectors where a thread's share ends
        torch.testing.assert_close(together, alone)


# Types


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_it_is(fused, dtype):
    inputs = torch.randn(400, 5).to(dtype) * 3
    assert_same_as_plain(fused, ghmc_loss, inputs, torch.randint(-1, 5, (400,)))
    assert_same_as_plain(fused, ghmc_loss, inputs, torch.rand(400, 5))
    assert_same_as_plain(fused, ghmr_loss, inputs, torch.rand(400, 5), mu=0.5)


def test_half_precision_on_both_sides(fused):
    inputs, targets = torch.randn(400).bfloat16(), torch.rand(400).bfloat16()
    assert_same_as_plain(fused, ghmc_loss, inputs, targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_read_right(fused, dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    every = every[every.isfinite()]
    assert_same_as_plain(fused, ghmr_loss, every, torch.zeros(len(every)), mu=1.1e-6, valid=every.abs() < 1e-3)
    assert_same_as_plain(fused, ghmr_loss, every, torch.zeros(len(every)), mu=101.3, valid=every.abs() < 1e6)


@pytest.mark.parametrize("weight", [1e-4, 100.0, 1e5])
def test_half_precision_bears_any_weight(fused, weight):
    inputs, weight = torch.randn(400).half(), torch.full((400,), weight)
    factor = 1 / weight.max().item()  # as GradScaler would set it
    assert_same_as_plain(fused, ghmc_loss, inputs, torch.rand(400), weight=weight, factor=factor)


def test_a_rare_region_in_half_precision_costs_the_others_nothing(fused):
    inputs = torch.cat([torch.full((100_000,), -4.0), torch.tensor([4.0])]).half()
    assert_same_as_plain(fused, ghmc_loss, inputs, torch.zeros(100_001), factor=65536.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_class_indices_of_any_integer_type(fused, dtype):
    classes = torch.randint(0, 5, (60,)) if dtype == torch.uint8 else torch.randint(-1, 5, (60,))
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 5), classes.to(dtype))
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 300), classes.to(dtype))  # more classes than int8 counts


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
def test_dense_targets_of_any_type(fused, dtype):
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 5), torch.randint(0, 2, (60, 5)).to(dtype))


# Memory

STRIDES = {
    "transposed": lambda: torch.randn(5, 60).t(),
    "with gaps": lambda: torch.randn(60, 15)[:, ::3],
    "reversed in blocks": lambda: torch.randn(3, 5, 20).permute(2, 0, 1).reshape(60, 5),
    "a part of something larger": lambda: torch.randn(90, 8)[10:70, 2:7],
    "one row for all": lambda: torch.randn(1, 5).expand(60, 5),
    "one column for all": lambda: torch.randn(60, 1).expand(60, 5),
}


@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES.keys())
def test_inputs_of_any_strides(fused, make):
    inputs, valid = make(), torch.rand(60, 5) < 0.7
    assert_same_as_plain(fused, ghmc_loss, inputs, torch.randint(-1, 5, (60,)), valid=valid)
    assert_same_as_plain(fused, ghmc_loss, inputs, torch.rand(60, 5), valid=valid, weight=torch.rand(60, 1))
    assert_same_as_plain(fused, ghmr_loss, inputs, make(), mu=0.5, weight=torch.rand(1, 5))


def test_channels_last(fused):
    logits = torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last)
    valid, weight = torch.rand(2, 6, 7) < 0.7, torch.rand(1, 5, 1, 1)
    assert_same_as_plain(
        fused, ghmc_loss, logits, torch.randint(-1, 5, (2, 6, 7)), class_dim=1, valid=valid, weight=weight
    )
    assert_same_as_plain(fused, ghmc_loss, logits, torch.rand(2, 5, 6, 7), valid=valid.unsqueeze(1), weight=weight)


def test_targets_masks_and_weights_of_other_strides_than_the_inputs(fused):
    targets, valid, weight = torch.rand(5, 60).t(), torch.rand(5, 60).t() < 0.7, torch.rand(60, 10)[:, ::2]
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 5), targets, valid=valid, weight=weight)
    classes = torch.randint(-1, 5, (60, 2))[:, 0]
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 5), classes, valid=torch.rand(60, 2)[:, 1] < 0.7)


# Masks and weights

FORMS = {
    "none": None,
    "one": (),
    "element": (6, 4, 5),
    "position": (6, 4),  # with index targets
    "column": (6, 4, 1),
    "class": (1, 1, 5),
    "last": (5,),
    "first": (6, 1, 1),
    "first and last": (6, 1, 5),
    "last two": (4, 5),
}


@pytest.mark.parametrize("weight_form", FORMS)
@pytest.mark.parametrize("valid_form", FORMS)
def test_every_form_of_mask_meets_every_form_of_weight(fused, valid_form, weight_form):
    logits, valid, weight = torch.randn(6, 4, 5), FORMS[valid_form], FORMS[weight_form]
    valid = None if valid is None else torch.rand(valid) < 0.7
    weight = None if weight is None else torch.rand(weight) + 0.1
    assert_same_as_plain(fused, ghmc_loss, logits, torch.randint(-1, 5, (6, 4)), valid=valid, weight=weight)
    if "position" not in (valid_form, weight_form):
        assert_same_as_plain(fused, ghmc_loss, logits, torch.rand(6, 4, 5), valid=valid, weight=weight)


@pytest.mark.usefixtures("any_implementation")
def test_where_a_mask_reads_both_ways_the_targets_shape_wins():
    logits, classes, valid = torch.randn(3, 3), torch.tensor([0, -1, 2]), torch.tensor([True, False, True])
    expected = ghmc_loss(logits[valid], classes[valid])
    assert ghmc_loss(logits, classes, valid=valid).item() == pytest.approx(expected.item(), rel=1e-6)
    by_class = ghmc_loss(logits, classes, valid=valid[None])
    dense = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert by_class.item() == pytest.approx(ghmc_loss(logits[:, valid], dense[:, valid]).item(), rel=1e-6)


@pytest.mark.usefixtures("any_implementation")
def test_indices_are_the_dense_targets_they_stand_for():
    logits, classes = torch.randn(60, 5), torch.randint(-1, 5, (60,))
    dense = torch.zeros(60, 6).scatter_(1, classes[:, None] % 6, 1.0)[:, :5]
    assert ghmc_loss(logits, classes).item() == pytest.approx(ghmc_loss(logits, dense).item(), rel=1e-6)


@pytest.mark.parametrize("settings", [{"normalizer": "occupied"}, {"max_weight": 1.5}, {"bins": 1}])
def test_every_setting(fused, settings):
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 5), torch.randint(-1, 5, (60,)), **settings)
    assert_same_as_plain(fused, ghmr_loss, torch.randn(60, 4), torch.randn(60, 4), mu=0.5, **settings)


def test_the_fine_histogram(fused):
    # between the edges of a narrow cell a weight can be steep: a last bit of g is up to 5e-4 of it
    classes, boxes = torch.randint(-1, 5, (60,)), torch.randn(60, 4)
    assert_same_as_plain(fused, ghmc_loss, torch.randn(60, 5), classes, density="exact", relative=1e-3)
    assert_same_as_plain(fused, ghmr_loss, torch.randn(60, 4), boxes, mu=0.5, density="exact", relative=1e-3)


def test_the_largest_logits(fused):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.tensor([[1e4, -1e4, 0.5], [-1e4, 1e4, -0.5]], dtype=dtype)
        assert_same_as_plain(fused, ghmc_loss, logits, torch.tensor([0, 2]))
        assert_same_as_plain(fused, ghmc_loss, logits, torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.0]]))
