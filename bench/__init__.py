"""Measurements. A package with this file, for otherwise a package `bench` of others would be found first."""
