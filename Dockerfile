# The gym-trace command line in a small image without root:
#   docker build -t gym-trace .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" gym-trace record CartPole-v1 -o traces/cartpole --episodes 3
# EXTRAS installs more: docker build --build-arg EXTRAS=sql,view -t gym-trace .
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
RUN python -m venv /opt/gym-trace
COPY . /source
ARG EXTRAS=
RUN /opt/gym-trace/bin/pip install --no-cache-dir "/source${EXTRAS:+[$EXTRAS]}" \
    && /opt/gym-trace/bin/pip uninstall --yes pip \
    && GYM_TRACE_PURE= /opt/gym-trace/bin/gym-trace --version | grep --quiet "C core: yes"

FROM ${BASE}
COPY --from=build /opt/gym-trace /opt/gym-trace
RUN useradd --uid 1000 --create-home gym && install --directory --owner gym /work
ENV PATH=/opt/gym-trace/bin:$PATH
USER gym
WORKDIR /work
ENTRYPOINT ["gym-trace"]
CMD ["doctor"]
