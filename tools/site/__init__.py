"""The documentation as a site: ``python -m tools.site`` builds ``out/site`` from the pages of ``docs/``.

``commands`` writes the reference of commands, ``gallery`` the plans of the gallery with their reports,
``conf`` is read by Sphinx.
"""
