"""Ranks in processes of their own: how they are started, found, told what to do, and watched."""
