"""The expert side of moe-serve: expert weights, the expert stage and expert placement.

Never imports `moe_serve`.
"""
