"""The drawings of the documentation, each made by a function here."""
