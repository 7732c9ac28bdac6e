"""The mutations of functions for experts and integers, and of torch.ops.npu; part of mutations.py's."""

from mutant import package

EXPERTS = [
    package("rows of one token are spread as those of another", "npu/auxiliary/experts.py",
          "[order // choices, order % choices]", "[order % len(tokens), order // len(tokens)]",
          "npu/test_experts.py::test_permute_and_back"),
    package("four bits lie in the other order", "npu/auxiliary/quantised.py",
          "(4 * torch.arange(8, device=y.device))", "(28 - 4 * torch.arange(8, device=y.device))",
          "npu/test_integer_products.py::test_dynamic_quant_of_four_bits_and_groups"),
    package("a group of rows begins where the one before it began", "npu/auxiliary/products.py",
          "self(x[a:b], i, a)", "self(x[a:b], i, 0)",
          "npu/test_integer_products.py::test_integers_in_groups"),
    package("an operator of torch.ops.npu loses its gradient", "npu/operators.py",
          "if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):", "if False:",
          "npu/test_torch_operators.py::test_opcheck"),
]  # fmt: skip
