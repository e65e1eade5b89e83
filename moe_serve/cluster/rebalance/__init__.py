"""Moves experts between ranks while they serve: measures, plans, copies and switches."""
