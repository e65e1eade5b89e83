"""The attention stage of a decoder layer."""
