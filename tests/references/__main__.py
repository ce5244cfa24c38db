"""Writes the references that the command line names."""

import sys

import references

for name in sys.argv[1:]:
    references.save(name)
