# experiential on a CPU, as an ordinary user:
#   docker build --tag experiential .
#   docker run --rm --volume "$PWD/runs:/work/runs" experiential experiential-train --recipe complementary
# A bank that other machines may open (a random token is printed where none is set):
#   docker run --env EXPERIENTIAL_TOKEN --publish 8321:8321 --volume "$PWD/bank:/work/bank" \
#     experiential experiential serve bank --host 0.0.0.0
FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt experiential_verifiers.py ./
COPY tools/project_urls.py ./tools/project_urls.py
COPY experiential ./experiential
RUN python -m venv /venv \
    && /venv/bin/pip install --no-cache-dir "torch==2.13.0" --index-url https://download.pytorch.org/whl/cpu \
    && /venv/bin/pip install --no-cache-dir --constraint constraints.txt ".[local,serve,mcp,bench]"

FROM python:3.12-slim-bookworm
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 user && install --directory --owner 1000 /work
USER 1000
WORKDIR /work
CMD ["experiential", "--help"]
