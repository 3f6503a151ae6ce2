"""The build backend that pyproject.toml names: `pip install .` ends in one sentence.

pytest tests/test_house.py
"""

SENTENCE = (
    "This repository is run from its folder (pip install -r requirements.txt && python train.py): "
    "modules called model and train do not belong in site-packages."
)


def get_requires_for_build_wheel(config_settings=None):
    raise SystemExit(SENTENCE)


get_requires_for_build_sdist = get_requires_for_build_wheel
get_requires_for_build_editable = get_requires_for_build_wheel
