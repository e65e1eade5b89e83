"""Keeps the targets of service tiers: order, shares, preemption, step budget and admission."""
