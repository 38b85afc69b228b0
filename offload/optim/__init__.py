"""Update rules: settings by parameter, planes of their own, the update of a stretch of weights."""
