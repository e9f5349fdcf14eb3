"""Configuration of the documentation site: ``make docs`` builds it, offline, into out/docs."""

import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType

from sphinx_gallery.sorting import ExplicitOrder

import meha

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))

# Namespaces such as meha.nonsmooth are attributes, whose modules have other names; autodoc imports what it documents by name.
for name, value in vars(meha).items():
    if isinstance(value, ModuleType) and name in meha.__all__:
        sys.modules.setdefault(f"meha.{name}", value)
del name, value

project = "meha"
author = "the meha developers"
copyright = "the meha developers"
version = release = installed_version("meha")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "formulas",
    "data_profile",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_templates", "**/*.ipynb", "gallery/GALLERY_HEADER.rst"]
templates_path = ["_templates"]
suppress_warnings = ["config.cache"]  # the order of the gallery is an object that is not pickled
nitpicky = False

# Pages in Markdown
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

# Docstrings
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {name: name for name in ("Schedule", "OptimizerFactory", "Observer", "Weight", "Leaves")}
maximum_signature_line_length = 88
MADE_BY_SKLEARN = "set_fit_request, set_predict_request, set_score_request, set_partial_fit_request, get_metadata_routing"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": MADE_BY_SKLEARN}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
add_module_names = False

# The gallery: every example runs when the site is built. MEHA_GALLERY=check runs the quick ones only.
QUICK = ("label_noise", "group_lasso", "which_y", "broken_problem", "own_method")
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": rf"/({'|'.join(QUICK)})\.py$"
    if os.environ.get("MEHA_GALLERY") == "check"
    else r"/(?!llm_domain_weights)\w+\.py$",  # which takes minutes
    "ignore_pattern": r"__init__\.py|/_",
    "within_subsection_order": ExplicitOrder(
        [
            "label_noise.py",
            "penalty_per_feature.py",
            "group_lasso.py",
            "support_vectors.py",
            "svm_dual.py",
            "tolls.py",
            "pricing.py",
            "dataset_distillation.py",
            "loss_weights.py",
            "long_tailed.py",
            "augmentation.py",
            "few_shot.py",
            "clean_digits.py",
            "two_basins.py",
            "which_y.py",
            "broken_problem.py",
            "long_run.py",
            "own_loop.py",
            "compiled.py",
            "own_prox.py",
            "own_method.py",
            "*",
        ]
    ),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "capture_repr": (),
    "matplotlib_animations": False,
    "min_reported_time": 3600,
}

# HTML
html_theme = "furo"
html_title = "meha"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_extra_path = [str(ROOT / "out" / "site-extra")] if (ROOT / "out" / "site-extra").exists() else []
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "native"


def setup(app):
    """Show aliases of types in signatures by their names."""

    def named(app, what, name, obj, options, signature, returns):
        texts = (text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, returns))
        return tuple(texts)

    app.connect("autodoc-process-signature", named)
