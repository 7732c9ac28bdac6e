"""Attention interfaces of other libraries, computed by this one."""
