"""Tests of nvdd; a package so that tests can import the harness as ``tests._spawn``."""
