"""Moves experts between ranks while these serve: measures, plans, copies and switches."""
