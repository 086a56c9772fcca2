"""Right strategies that rows leave out on purpose, by reason. ``test_missing`` reports all others."""

LEFT_OUT: dict[str, dict[str, tuple[str, ...]]] = {
    "true of the samples only: their numbers are finite and not zero": {
        "aten.isnan": ("P(sum) -> R",),
        "aten.isinf": ("P(sum) -> R",),
        "aten.isfinite": ("P(sum) -> R",),
        "aten.nan_to_num": ("P(sum) -> P(sum)",),
        "aten.nansum": ("P(sum) -> P(sum)",),
        "aten.isposinf": ("P(sum) -> R",),
        "aten.isneginf": ("P(sum) -> R",),
        "aten.heaviside": (
            "R, P(sum) -> R",
            "S(0), P(sum) -> S(0)",
        ),
    },
    "a shift of integers is linear, and never met on a partial sum": {
        "aten.__lshift__.Scalar": ("P(sum) -> P(sum)",),
        "aten.__lshift__.Tensor": ("P(sum), R -> P(sum)",),
    },
    "an input whose values are not read may be held in any way, but is then there in the usual one too": {
        "aten.full_like": ("P(sum) -> R",),
        "aten.zeros_like": (
            "P(sum) -> P(sum)",
            "P(sum) -> R",
        ),
        "aten.ones_like": ("P(sum) -> R",),
        "aten.empty_like": (
            "P(sum) -> P(sum)",
            "P(sum) -> R",
        ),
        "aten.fill.Scalar": ("P(sum) -> R",),
        "aten.fill.Tensor": (
            "P(sum), R -> R",
            "P(sum), P(sum) -> P(sum)",
        ),
        "aten.copy": (
            "P(sum), R -> R",
            "P(sum), P(sum) -> P(sum)",
        ),
        "aten.type_as": (
            "R, P(sum) -> R",
            "R, S(0) -> R",
            "R, S(1) -> R",
            "P(sum), P(sum) -> P(sum)",
            "P(sum), S(0) -> P(sum)",
            "P(sum), S(1) -> P(sum)",
            "S(0), R -> S(0)",
            "S(0), P(sum) -> S(0)",
            "S(1), R -> S(1)",
            "S(1), P(sum) -> S(1)",
        ),
        "aten.new_zeros": (
            "P(sum) -> P(sum)",
            "P(sum) -> R",
            "S(0) -> S(1)",
            "S(0) -> P(sum)",
            "S(0) -> R",
            "S(1) -> S(1)",
            "S(1) -> P(sum)",
            "S(1) -> R",
        ),
        "aten.new_ones": (
            "P(sum) -> R",
            "S(0) -> S(1)",
            "S(0) -> R",
            "S(1) -> S(1)",
            "S(1) -> R",
        ),
        "aten.new_full": (
            "P(sum) -> R",
            "S(0) -> S(1)",
            "S(0) -> R",
            "S(1) -> S(1)",
            "S(1) -> R",
        ),
        "aten.new_empty": (
            "P(sum) -> P(sum)",
            "P(sum) -> R",
            "S(0) -> S(1)",
            "S(0) -> P(sum)",
            "S(0) -> R",
            "S(1) -> S(1)",
            "S(1) -> P(sum)",
            "S(1) -> R",
        ),
        "aten.bernoulli.p": (
            "P(sum) -> R",
            "S(0) -> R",
            "S(1) -> R",
        ),
        "aten.rand_like": (
            "P(sum) -> R",
            "S(0) -> R",
            "S(1) -> R",
        ),
        "aten.randn_like": (
            "P(sum) -> R",
            "S(0) -> R",
            "S(1) -> R",
        ),
    },
    "with beta=0 the added term is not read": {
        "aten.baddbmm": (
            "R, R, P(sum) -> P(sum)",
            "R, P(sum), R -> P(sum)",
            "R, S(2), S(1) -> P(sum)",
            "P(sum), R, R -> R",
            "P(sum), S(1), R -> S(1)",
            "S(2), R, R -> R",
            "S(2), R, P(sum) -> P(sum)",
            "S(2), P(sum), R -> P(sum)",
            "S(2), S(2), S(1) -> P(sum)",
        ),
    },
    "fused kernels want values as wide as queries": {
        "aten.scaled_dot_product_attention": (
            "R, R, S(3) -> S(3)",
            "R, R, S(3), R -> S(3)",
            "R, R, S(2) -> S(2)",
            "R, R, S(2), R -> S(2)",
        ),
    },
    "scales, shifts and fixed statistics are parameters: never partial sums": {
        "aten.layer_norm": (
            "R, P(sum), P(sum) -> P(sum)",
            "R, P(sum) -> P(sum)",
        ),
        "aten.rms_norm": ("R, P(sum) -> P(sum)",),
        "aten.group_norm": ("R, P(sum), P(sum) -> P(sum)",),
        "aten.batch_norm": (
            "R, P(sum), P(sum), R, R -> P(sum)",
            "P(sum), R, P(sum), P(sum), R -> P(sum)",
            "R, P(sum), P(sum) -> P(sum)",
            "P(sum), P(sum), R -> P(sum)",
        ),
        "aten._native_batch_norm_legit_no_training": (
            "R, P(sum), P(sum), R, R -> P(sum), P(sum), P(sum)",
            "P(sum), R, P(sum), P(sum), R -> P(sum), P(sum), P(sum)",
        ),
        "mixmesh.normalise": (
            "R, R, P(sum), P(sum) -> P(sum)",
            "R, R, P(sum) -> P(sum)",
        ),
        "aten.instance_norm": (
            "R, P(sum), P(sum) -> P(sum)",
            "R, P(sum), P(sum), R, R -> P(sum)",
            "P(sum), R, P(sum), P(sum), R -> P(sum)",
        ),
        "aten._weight_norm": ("R, P(sum) -> P(sum)",),
    },
    "class weights and targets are given: never partial sums": {
        "aten.cross_entropy_loss": (
            "R, R, P(sum) -> P(sum)",
            "R, P(sum) -> P(sum)",
        ),
        "aten.multi_margin_loss": ("R, R, P(sum) -> P(sum)",),
        "aten.nll_loss": ("R, R, P(sum) -> P(sum)",),
        "aten.nll_loss_nd": ("R, R, P(sum) -> P(sum)",),
        "aten.nll_loss_forward": ("R, R, P(sum) -> P(sum), P(sum)",),
        "aten.binary_cross_entropy": ("R, R, P(sum) -> P(sum)",),
        "aten.binary_cross_entropy_with_logits": ("R, R, P(sum), R -> P(sum)",),
    },
    "a scattered sum is written as scatter_add": {
        "aten.scatter_reduce.two": (
            "P(sum), R, P(sum) -> P(sum)",
            "P(sum), S(1), S(1) -> P(sum)",
        ),
    },
    "a convolution whose kernel is as large as the image is a product; its channels are cut instead": {
        "aten.conv1d": ("S(2), S(2), P(sum) -> P(sum)",),
        "aten.conv2d": ("S(2), S(2), P(sum) -> P(sum)",),
        "aten.conv3d": (
            "S(2), S(2), P(sum) -> P(sum)",
            "S(4), S(4), P(sum) -> P(sum)",
        ),
    },
    "true only where no two windows have one maximum in common": {
        "aten.max_unpool2d": ("S(3), S(3) -> P(sum)",),
        "aten.max_unpool3d": ("S(4), S(4) -> P(sum)",),
    },
    "a strided slice of whole strides": {
        "aten.slice.Tensor": ("S(1) -> S(1)",),
    },
    "the last product of an expert may be summed or cut by columns, but its first product is not cut so": {
        "mixmesh.experts": (
            "R, R, P(sum), R, R -> P(sum)",
            "R, R, R, R, P(sum) -> P(sum)",
            "R, R, R, R, S(2) -> S(1)",
        ),
        "mixmesh.selected": (
            "R, R, R, P(sum), P(sum) -> P(sum)",
            "R, R, R, S(0), S(0) -> S(1)",
            "R, R, P(sum), R, R -> P(sum)",
            "R, P(sum), R, R, P(sum) -> P(sum)",
            "R, R, R, S(0), S(0) -> S(2)",
            "R, R, P(sum), R, P(sum) -> P(sum)",
            "R, P(sum), R, R, R -> P(sum)",
            "R, R, S(0) -> S(2)",
        ),
    },
}
