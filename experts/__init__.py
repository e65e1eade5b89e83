"""The expert side of moe-serve: expert weights, the expert stage, and (later) their placement.

Never imports `moe_serve`.
"""
