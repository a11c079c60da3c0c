# What a contributor needs. `just` lists it; https://just.systems
_default:
    @just --list

# install softdb with everything for development, and the hooks
setup:
    pip install -c constraints.txt -e '.[dev]' pre-commit
    pre-commit install

# the tests that a user or first contributor should run
test *arguments:
    pytest -n 2 --dist loadfile {{arguments}}

# the tests that take longer
slow *arguments:
    pytest -n 2 --dist loadfile -m "slow and not exhaustive" {{arguments}}

# style and types
lint:
    ruff check .
    ruff format --check .
    mypy

# pages: blocks run, links lead somewhere, names exist; then HTML in build/docs
docs:
    pytest tests/house
    sphinx-build -W -q docs build/docs

# recall and speed on a seeded world
bench *arguments:
    softdb bench clustered --n 200000 --dim 128 --recalls 0.95 {{arguments}}
