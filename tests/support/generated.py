"""How many cases a property test generates."""

from hypothesis import settings

USUAL = 100  # Hypothesis's own number of examples, which the profile of every run leaves alone


def examples(count: int) -> settings:
    """`count` of them where every run generates the same ones; under `--hypothesis-profile
    new-cases` as many times that as its profile has of the usual number."""
    return settings(max_examples=count * settings.default.max_examples // USUAL)  # type: ignore[union-attr]
