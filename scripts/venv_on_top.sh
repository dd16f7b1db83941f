# Sourced: `venv_on_top NAME MARK PACKAGES...` makes the environment NAME on top of .venv, once for each MARK.
# Versions of other packages that PACKAGES bring along may not suit the trainer, so .venv itself stays as it is.
venv_on_top() {
    local venv="$1" mark="$1/.installed-$2" packages
    if [[ ! -f "$mark" ]]; then
        .venv/bin/python -m venv --without-pip "$venv"
        packages="$("$venv/bin/python" -c "import site; print(site.getsitepackages()[0])")"
        .venv/bin/python -c "import site; print(site.getsitepackages()[0])" > "$packages/trainer.pth"
        "$venv/bin/python" -m pip install --quiet "${@:3}"
        touch "$mark"
    fi
}
