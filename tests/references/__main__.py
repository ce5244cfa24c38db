"""Writes the references named on the command line."""

import sys

import references

for name in sys.argv[1:]:
    references.save(name)
