"""The functions that stand around attention in a model, under torch_npu's names."""
