"""The device "npu" of torch: its own, or another name of the one that computes."""
