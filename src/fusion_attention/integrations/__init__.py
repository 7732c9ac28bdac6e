"""Calls written for other libraries, answered by this one."""
