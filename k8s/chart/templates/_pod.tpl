{{- define "torchere.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}
{{- end -}}

{{- define "torchere.resources" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $limits := merge (deepCopy $v.limits) (.Values.resources.limits | default dict) -}}
{{- $requests := merge (deepCopy $v.requests) (.Values.resources.requests | default dict) -}}
{{- if gt (int $v.gpus) 0 -}}
{{- $_ := set $limits .Values.gpu.resourceName ($v.gpus | int) -}}
{{- end -}}
{{- toYaml (dict "requests" $requests "limits" $limits) -}}
{{- end -}}

{{/* Variables: defaults, and those of the values. A name may not come twice: server-side apply, as of Helm 4, refuses that. */}}
{{- define "torchere.env" -}}
{{- $names := list -}}
{{- range .given -}}{{- $names = append $names .name -}}{{- end -}}
{{- $variables := list -}}
{{- range $name, $value := .defaults -}}
{{- if not (has $name $names) -}}{{- $variables = append $variables (dict "name" $name "value" $value) -}}{{- end -}}
{{- end -}}
{{- toYaml (concat $variables (.given | default list)) -}}
{{- end -}}

{{- define "torchere.mounts" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
- {name: scratch, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if eq $v.configFrom "chart" }}
- {name: config, mountPath: /etc/torchere, readOnly: true}
{{- end }}
{{- if eq $v.configFrom "volume" }}
- {name: store, mountPath: {{ $v.mount | quote }}, readOnly: true}
{{- else if ne $v.storeType "bundled" }}
{{- $subPath := dig $v.storeType "subPath" "" .Values.modelStore }}
- {name: store, mountPath: {{ include "torchere.store" . }}, readOnly: true{{ with $subPath }}, subPath: {{ . | quote }}{{ end }}}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /run/torchere-tls, readOnly: true}
{{- end }}
{{- if and .Values.auth.enabled .Values.auth.secretName }}
- {name: keys, mountPath: /run/torchere-keys, readOnly: true}
{{- else if .Values.auth.enabled }}
- {name: keys, mountPath: /run/torchere}
{{- end }}
{{- if .Values.leaderWorkerSet.enabled }}
- {name: rendezvous, mountPath: /run/torchere-rendezvous, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{- define "torchere.volumes" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.scratch }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- if eq $v.configFrom "chart" }}
- name: config
  configMap: {name: {{ include "torchere.fullname" . }}}
{{- end }}
{{- if eq $v.storeType "pvc" }}
- name: store
  persistentVolumeClaim: {claimName: {{ $v.claimName | quote }}, readOnly: true}
{{- else if eq $v.storeType "image" }}
- name: store
  image: {reference: {{ include "torchere.mirrored" (dict "image" .Values.modelStore.image.reference "root" .) | quote }}, pullPolicy: {{ .Values.modelStore.image.pullPolicy }}}
{{- else if ne $v.storeType "bundled" }}
- name: store
  emptyDir: {sizeLimit: {{ .Values.modelStore.sizeLimit }}}
{{- end }}
{{- if and (eq $v.storeType "gcs") .Values.modelStore.gcs.secretName }}
- name: store-credentials
  secret: {secretName: {{ .Values.modelStore.gcs.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- if and .Values.auth.enabled .Values.auth.secretName }}
- name: keys
  secret:
    secretName: {{ .Values.auth.secretName | quote }}
    defaultMode: 0440
    items: [{key: {{ .Values.auth.secretKey | quote }}, path: keys.json}]
{{- else if .Values.auth.enabled }}
- name: keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- if .Values.leaderWorkerSet.enabled }}
- name: rendezvous
  secret:
    secretName: {{ .Values.leaderWorkerSet.secretName | quote }}
    defaultMode: 0440
    items: [{key: {{ .Values.leaderWorkerSet.secretKey | quote }}, path: secret}]
{{- end }}
{{- with .Values.extraVolumes }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end -}}

{{/* The container that fills the store before the server starts; nothing where it is mounted. */}}
{{- define "torchere.initContainers" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $fetched := has $v.storeType (list "s3" "gcs" "azure" "init") -}}
{{- if or $fetched .Values.extraInitContainers -}}
initContainers:
{{- if $fetched }}
  - name: fetch-models
    {{- if eq $v.storeType "s3" }}
    {{- $s3 := .Values.modelStore.s3 }}
    image: {{ include "torchere.mirrored" (dict "image" $s3.image "root" .) | quote }}
    command: [aws]
    args: [s3, sync, --only-show-errors, {{ $s3.uri | quote }}, /mnt/model-store]
    env:
      - {name: HOME, value: /tmp}
      {{- with $s3.endpointUrl }}
      - {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
      {{- end }}
      {{- with $s3.region }}
      - {name: AWS_REGION, value: {{ . | quote }}}
      {{- end }}
    {{- with $s3.secretName }}
    envFrom:
      - secretRef: {name: {{ . | quote }}}
    {{- end }}
    {{- else if has $v.storeType (list "gcs" "azure") }}
    {{- $source := get .Values.modelStore $v.storeType }}
    image: {{ include "torchere.mirrored" (dict "image" .Values.modelStore.initializerImage "root" .) | quote }}
    args: [{{ $source.uri | quote }}, /mnt/model-store]
    env:
      - {name: HOME, value: /tmp}
    {{- if and (eq $v.storeType "gcs") $source.secretName }}
      - {name: GOOGLE_APPLICATION_CREDENTIALS, value: {{ printf "/run/store-credentials/%s" $source.secretKey | quote }}}
    {{- else if $source.secretName }}
    envFrom:
      - secretRef: {name: {{ $source.secretName | quote }}}
    {{- end }}
    {{- else }}
    {{- $init := .Values.modelStore.init }}
    image: {{ include "torchere.mirrored" (dict "image" $init.image "root" .) | quote }}
    {{- with $init.command }}
    command: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $init.args }}
    args: {{- toYaml . | nindent 6 }}
    {{- end }}
    env:
      {{- include "torchere.env" (dict "given" $init.env "defaults" (dict "HOME" "/tmp" "MODEL_STORE" "/mnt/model-store")) | nindent 6 }}
    {{- with $init.envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
    resources: {{- toYaml .Values.modelStore.resources | nindent 6 }}
    securityContext: {{- toYaml .Values.securityContext | nindent 6 }}
    volumeMounts:
      - {name: store, mountPath: /mnt/model-store}
      - {name: scratch, mountPath: /tmp}
      {{- if and (eq $v.storeType "gcs") .Values.modelStore.gcs.secretName }}
      - {name: store-credentials, mountPath: /run/store-credentials, readOnly: true}
      {{- end }}
{{- end }}
{{- with .Values.extraInitContainers }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}
{{- end -}}

{{/* The pod of a server, for the Deployment, or for the leaders of a LeaderWorkerSet. */}}
{{- define "torchere.podTemplate" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $fromVolume := eq $v.configFrom "volume" -}}
metadata:
  labels:
    {{- include "torchere.selector" . | nindent 4 }}
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    kubectl.kubernetes.io/default-container: torchere
    {{- if not $fromVolume }}
    checksum/config: {{ include "torchere.properties" . | sha256sum }}
    {{- end }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "torchere.placement" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "torchere.grace" . }}
  {{- if .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $ours := dict "labelSelector" (dict "matchLabels" (include "torchere.selector" . | fromYaml)) }}
    {{- range .Values.topologySpreadConstraints }}
    - {{- toYaml (ternary . (merge (deepCopy .) $ours) (kindIs "map" .labelSelector)) | nindent 6 }}
    {{- end }}
  {{- else if .Values.topologySpread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "torchere.selector" . | nindent 10 }}
    - maxSkew: 1
      topologyKey: topology.kubernetes.io/zone
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "torchere.selector" . | nindent 10 }}
  {{- end }}
  {{- with include "torchere.initContainers" . }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: torchere
      image: {{ include "torchere.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      # The keys, if any, and whatever handlers write to their working directory go to a scratch volume.
      workingDir: /tmp
      args:
        - torchere
        - serve
        - --ncs
        - --log-level={{ .Values.server.logLevel }}
        - --log-format=json
        {{- if $fromVolume }}
        - --ts-config={{ trimSuffix "/" $v.mount }}/config/config.properties
        - --model-store={{ include "torchere.store" . }}
        {{- else }}
        - --ts-config=/etc/torchere/config.properties
        {{- end }}
        {{- with .Values.server.extraArgs }}{{ toYaml . | nindent 8 }}{{ end }}
      env:
        {{- include "torchere.env" (dict "given" .Values.server.env "defaults" (dict "TEMP" "/tmp" "HOME" "/tmp")) | nindent 8 }}
      {{- with .Values.server.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: {{ $v.ports.http }}}
        - {name: grpc, containerPort: {{ $v.ports.grpc }}}
        - {name: metrics, containerPort: {{ $v.ports.metrics }}}
        {{- if .Values.management.enabled }}
        - {name: management, containerPort: {{ $v.ports.management }}}
        - {name: grpc-management, containerPort: {{ $v.ports.grpcManagement }}}
        {{- end }}
      # Started: every model's first load is over, well or not, so that a long one is not taken for a hang.
      # Alive: the event loop turns, whatever the models do. Ready: every model is, and the server stays.
      startupProbe:
        {{- include "torchere.probe" (dict "path" "/startupz" "root" .) | nindent 8 }}
        {{- toYaml .Values.startup | nindent 8 }}
      livenessProbe:
        {{- include "torchere.probe" (dict "path" "/livez" "root" .) | nindent 8 }}
        {{- toYaml .Values.liveness | nindent 8 }}
      readinessProbe:
        {{- include "torchere.probe" (dict "path" "/readyz" "root" .) | nindent 8 }}
        {{- toYaml .Values.readiness | nindent 8 }}
      {{- $lifecycle := deepCopy (.Values.lifecycle | default dict) }}
      {{- if and $fromVolume (not $lifecycle.preStop) }}
      {{- /* The claim's configuration is not ours to know; without drain_delay_s in it the server stops at once. */}}
      {{- $sleep := list "sleep" (ceil .Values.server.drainDelaySeconds | toString) }}
      {{- $_ := set $lifecycle "preStop" (dict "exec" (dict "command" $sleep)) }}
      {{- end }}
      {{- with $lifecycle }}
      lifecycle: {{- toYaml . | nindent 8 }}
      {{- end }}
      resources: {{- include "torchere.resources" . | nindent 8 }}
      securityContext: {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts: {{- include "torchere.mounts" . | nindent 8 }}
    {{- with .Values.extraContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes: {{- include "torchere.volumes" . | nindent 4 }}
{{- end -}}

{{/* Where the scheduler may put a pod, and what it runs as; for the pods of all kinds. */}}
{{- define "torchere.placement" -}}
serviceAccountName: {{ include "torchere.serviceAccount" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The pod of a further machine of a LeaderWorkerSet, which runs ranks and no server. */}}
{{- define "torchere.ranksTemplate" -}}
metadata:
  labels:
    {{- include "torchere.ranksSelector" . | nindent 4 }}
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    kubectl.kubernetes.io/default-container: ranks
    checksum/config: {{ include "torchere.properties" . | sha256sum }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "torchere.placement" . | nindent 2 }}
  terminationGracePeriodSeconds: 15
  {{- with include "torchere.initContainers" . }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: ranks
      image: {{ include "torchere.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      workingDir: /tmp
      args:
        - torchere
        - join
        - $(LWS_LEADER_ADDRESS):{{ .Values.leaderWorkerSet.port }}
        - --ts-config=/etc/torchere/config.properties
        - --log-level={{ .Values.server.logLevel }}
      env:
        {{- include "torchere.env" (dict "given" .Values.server.env "defaults" (dict "TEMP" "/tmp" "HOME" "/tmp")) | nindent 8 }}
      {{- with .Values.server.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      resources: {{- include "torchere.resources" . | nindent 8 }}
      securityContext: {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts: {{- include "torchere.mounts" . | nindent 8 }}
  volumes: {{- include "torchere.volumes" . | nindent 4 }}
{{- end -}}
