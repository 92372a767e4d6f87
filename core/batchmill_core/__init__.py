"""Vocabulary of Batchmill: values and pure rules. Imports nothing else of ours."""
